"""The statements of random programs that are loops."""

import dataclasses
from typing import Any

from program_models import Tally
from program_writer import ANY, Context, Node, nodes_of, Statement, Writer


def layer_of(ctx: Context, stack: Node, name: str, level: int) -> Node:
    """The node for one element of a stack, in a body that maps or scans the stack."""
    spec = dataclasses.replace(stack.spec, is_stack=False)
    return dataclasses.replace(
        stack,
        text=name,
        path=("slice", *stack.path, "slice"),
        spec=spec,
        level=level,
        is_shared=level > stack.level + 1,
        assign="",
    )


def whole_of(stack: Node) -> str:
    """A parameter of the whole stack, as the closure sees it."""
    return f"{stack.text}.{'ws[0]' if stack.spec.cls is Tally else 'w'}"


def scan(w: Writer, ctx: Context) -> Statement:
    """A scan over an array, with the state of modules in the closure."""
    reverse = w.pick(["", ", reverse=True"])
    head, tail = ("x = mix(c, y)",), "(x, 0.5 * x)"
    lines, f = w.whole(ctx.into(steps=ctx.steps + 1), "c, y", head, tail)
    ys = w.name("y")
    lines.append(f"x, {ys} = es.scan({f}, x, two(x){reverse})")
    return [*lines, f"x = mix(x, total({ys}))"], ctx


def scan_of_stack(w: Writer, ctx: Context) -> Statement:
    """A scan over a stack of layers."""
    if not (stacks := ctx.stacks()):
        return scan(w, ctx)
    stack, name = w.pick(stacks), w.name("m")
    layer = layer_of(ctx, stack, name, stack.level)
    hidden = (*ctx.hidden, stack.path)
    wholes = (*ctx.wholes, whole_of(stack))
    inner = ctx.into(
        nodes=(*ctx.nodes, layer), hidden=hidden, wholes=wholes, steps=ctx.steps + 1
    )
    lines, f = w.define(inner, f"x, {name}", (), "(x, 0.5 * x)")
    ys = w.name("y")
    lines.append(f"x, {ys} = es.scan({f}, x, {stack.text})")
    return [*lines, f"x = mix(x, total({ys}))"], ctx


def scan_of_carry(w: Writer, ctx: Context) -> Statement:
    """A module in the carry, which is returned and assigned."""
    node, lines, f, name, new = _carried(w, ctx, "c, y", "{}, x = c", "(({}, x), x)")
    if node is None:
        return scan(w, ctx)
    ys = w.name("y")
    lines.append(f"({new}, x), {ys} = es.scan({f}, ({node.text}, x), two(x))")
    return lines + _after(w, ctx, node, new), ctx


def while_loop(w: Writer, ctx: Context) -> Statement:
    test = "lambda c: c[0] < 2"
    head, tail = "i, {}, x = c", "(i + 1, {}, x)"
    node, lines, f, _, new = _carried(w, ctx, "c", head, tail, one_in=2)
    if node is not None:
        lines.append(f"_, {new}, x = es.while_loop({test}, {f}, (0, {node.text}, x))")
        return lines + _after(w, ctx, node, new), ctx
    inner = ctx.into(axes=frozenset(), loops=ctx.loops + 1)
    lines, f = w.whole(inner, "c", ("i, x = c",), "(i + 1, x)")
    return [*lines, f"x = es.while_loop({test}, {f}, (0, x))[1]"], ctx


def fori_loop(w: Writer, ctx: Context) -> Statement:
    head, tail = "{}, x = c", "({}, x)"
    node, lines, f, _, new = _carried(w, ctx, "i, c", head, tail, one_in=2)
    if node is not None:
        lines.append(f"{new}, x = es.fori_loop(0, 2, {f}, ({node.text}, x))")
        return lines + _after(w, ctx, node, new), ctx
    lines, f = w.whole(ctx.into(loops=ctx.loops + 1), "i, x")
    return [*lines, f"x = es.fori_loop(0, 2, {f}, x)"], ctx


def _carried(
    w: Writer, ctx: Context, params: str, head: str, tail: str, one_in: int = 1
) -> Any:
    """A module for the carry of a loop, and the function of the loop."""
    nodes = [n for n in ctx.readable() if w.is_assignable(ctx, n)]
    if not nodes or not w.chance(one_in):
        return None, [], "", "", ""
    node, name, new = w.pick(nodes), w.name("m"), w.name("m")
    inside = nodes_of(
        dataclasses.replace(
            node, text=name, path=("carry", *node.path), assign="", loops=ANY
        )
    )
    inner = ctx.into(
        nodes=(*ctx.nodes, *inside),
        hidden=(*ctx.hidden, node.path),
        axes=frozenset(),
        loops=ctx.loops + 1,
    )
    lines, f = w.define(inner, params, (head.format(name),), tail.format(name))
    return node, lines, f, name, new


def _after(w: Writer, ctx: Context, node: Node, new: str) -> list[str]:
    return [node.assign.replace("NEW", new)]
