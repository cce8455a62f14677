"""The statements of random programs: each calls a new function under a transform."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from program_faults import FAULTS
from program_loops import (
    fori_loop,
    layer_of,
    scan,
    scan_of_carry,
    scan_of_stack,
    while_loop,
    whole_of,
)
from program_models import (
    Both,
    Cell,
    COUNTERS,
    Net,
    Noise,
    Plain,
    Spec,
    STATICS,
)
from program_writer import (
    ANY,
    Context,
    Drawing,
    Expected,
    has_bare,
    has_key,
    Helper,
    Node,
    nodes_of,
    PARTIALS,
    related,
    Statement,
    Writer,
)


def _call(f: str, args: list[str], x: str = "x") -> str:
    return f"{f}({', '.join([*args, x])})"


def once(w: Writer, ctx: Context) -> Statement:
    """`es.jit` or `es.checkpoint`, of a function, of a module, or of its method."""
    transform = w.pick(["es.jit", "es.checkpoint"])
    readable, writable = ctx.readable(), ctx.writable()
    if readable and w.chance(4):
        node = w.pick(readable)
        f = node.text if node in writable and w.chance(2) else f"{node.text}.peek"
        return [f"x = {transform}({f})(x)"], ctx
    if readable and w.chance(3):
        node, new = w.pick(readable), w.name("m")
        lines, f, args = w.function(ctx.into(), tail=f"(x, {node.text})")
        lines.append(f"x, {new} = {_call(f'{transform}({f})', args)}")
        kept = dataclasses.replace(
            node, text=new, path=(new,), is_owned=False, level=ctx.level, assign=""
        )
        return lines, dataclasses.replace(ctx, nodes=(*ctx.nodes, *nodes_of(kept)))
    lines, f, args = w.function(ctx.into())
    return [*lines, f"x = {_call(f'{transform}({f})', args)}"], ctx


def static(w: Writer, ctx: Context) -> Statement:
    """One jitted function, called with static values that compare equal in Python."""
    f = w.name("f")
    lines, g = w.define(ctx.into(), "x, tag", ("x = mix(x, worth(tag))",))
    lines.append(f"{f} = es.jit({g})")
    # In `STATICS`, values that are easily confused are next to each other.
    i = w.below(len(STATICS))
    j = w.pick([min(i + 1, len(STATICS) - 1), i - i % 3, w.below(len(STATICS))])
    lines += [f"x = {f}(x, STATICS[{n}])" for n in (i, j)]
    return lines, ctx


def function_argument(w: Writer, ctx: Context) -> Statement:
    """A function that is passed to `es.jit` is returned as the same object."""
    # The function may close over a module that no scope owns.
    nodes = [n for n in ctx.readable() if not n.is_owned]
    g, f, again = w.name("f"), w.name("f"), w.name("f")
    if nodes and not w.chance(3):
        node, name = w.pick(nodes), w.name("m")
        lines = [f"{name} = {node.text}", f"{g} = lambda x: {name}.peek(x)"]
        text = w.pick([g, f"ft.partial({g})"])
        lines = [*lines, f"{g} = {text}"]
    else:
        lines = [f"{g} = lambda x: mix(x, 0.25)"]
    body, h = w.define(ctx.into(), "g, x", ("x = g(x)",), "(g, x)")
    lines += [*body, f"{f} = es.jit({h})"]
    for _ in range(2):
        lines += [f"{again}, x = {f}({g}, x)", f"assert {again} is {g}"]
    return lines, ctx


def two_scopes(w: Writer, ctx: Context) -> Statement:
    """One jitted function, called with two modules: of one scope, then of two."""
    nodes = [n for n in ctx.writable() if n.write_level == ctx.level]
    if not nodes:
        return once(w, ctx)
    a, b = w.pick(nodes), w.pick(nodes)
    if related(a.path, b.path):
        return once(w, ctx)
    p, q, f, g, y, new = (w.name(x) for x in "mmfffm")
    root = a.text.split(".")[0].split("[")[0]
    reach = [
        node
        for name, of in ((p, a), (q, b))
        for node in nodes_of(
            dataclasses.replace(of, text=name, path=(name,), assign="", loops=ANY)
        )
    ]
    lines, h = w.define(ctx.into(nodes=tuple(reach), helpers=()), f"{p}, {q}, x")
    kinds = ", kinds=(es.State, es.Buffer)" if a.has_buffers else ""
    lines += [
        f"{f} = es.jit({h})",
        f"x = {f}({a.text}, {b.text}, x)",
        # The path is the same in both scopes. The inner scope is that of a copy: it
        # would cover the write to the module of the outer one.
        f"def {g}({p}, x):",
        f"    return {f}({p}{a.text[len(root) :]}, {b.text}, x)",
        f"{y}, {new} = es.mutable({g}{kinds})(copied({root}), x)",
        f"x = {f}({a.text}, {b.text}, mix(x, {y}))",
    ]
    w.aliased |= {a.path, b.path}
    return lines, ctx


def twice(w: Writer, ctx: Context) -> Statement:
    """One jitted function, called again after a module that it uses was replaced."""
    # A module that no scope owns would be a constant of the compiled function, and a
    # scope owns no module of Equinox.
    nodes = [n for n in ctx.readable() if n.is_owned and not has_bare(n.spec)]
    name, f = w.name("m"), w.name("f")
    if not nodes:
        return once(w, ctx)
    a = w.pick(nodes)
    b = w.pick([n for n in nodes if n.spec.cls is a.spec.cls])
    w.aliased |= {a.path, b.path}
    box = w.pick([f"{name} = {{}}", f"{name} = [{{}}]", f"{name} = {{{{'k': {{}}}}}}"])
    text = {"[": f"{name}[0]", "{": f"{name}['k']"}.get(box[len(name) + 3], name)
    if box.endswith("= {}"):
        text = name
    both = dataclasses.replace(a, text=text, assign="")
    if a.write_level != b.write_level or not ctx.may_write(b):
        both = dataclasses.replace(both, is_given=True)
    # The function may write only what it may write to both modules.
    inner = ctx.into(nodes=(*ctx.nodes, both))
    lines, g = w.define(inner, "x")
    lines = [box.format(a.text), *lines, f"{f} = es.jit({g})", f"x = {f}(x)"]
    if w.chance(2):
        lines += w.simple(ctx)
    lines += [box.format(b.text) if text == name else f"{text} = {b.text}"]
    return [*lines, f"x = {f}(x)"], ctx


def shared(w: Writer, ctx: Context) -> Statement:
    """Two functions that communicate through a shared dict or closure variable."""
    nodes = ctx.readable()
    if not nodes:
        return once(w, ctx)
    node, box, put, get = w.pick(nodes), w.name("b"), w.name("f"), w.name("f")
    w.aliased.add(node.path)
    transform = w.pick(["es.jit", "es.checkpoint", "es.vmap"])
    if has_key(node.spec) and not node.is_owned:
        transform = "es.jit"
    if w.chance(2):
        lines = [
            f"{box} = {{'m': {node.text}, 'h': 0.0}}",
            f"def {put}(x):",
            f"    {box}['h'] = mix(x, 0.5)",
        ]
        read = f"{box}['m'].peek(mix({box}['h'], 0.25))"
    else:
        lines = [
            f"{box} = ({node.text}, 0.0)",
            f"def {put}(x):",
            f"    nonlocal {box}",
            f"    {box} = ({box}[0], mix(x, 0.5))",
        ]
        read = f"{box}[0].peek(mix({box}[1], 0.25))"
    lines += [f"def {get}():", f"    return {read}"]
    f = w.name("f")
    lines += [f"def {f}(x):", f"    {put}(x)", f"    return {get}()"]
    if transform == "es.vmap":
        return [*lines, f"x = total(es.vmap({f})(two(x)))"], ctx
    return [*lines, f"x = {transform}({f})(x)"], ctx


def vmap(w: Writer, ctx: Context) -> Statement:
    """Map over an array. Lanes share the modules, and have their own keys."""
    level = ctx.level + 1
    axes = ctx.axes | {level}
    steps = ctx.steps if ctx.level else 0
    # In a helper, `x` may also differ between the lanes that call it.
    x_level = max(level, ctx.x_level)
    inner = ctx.into(level=level, x_level=x_level, axes=axes, steps=steps)
    axis = w.pick(["None", "None", "{es.Rng: None}", "{es.Rng: es.SPLIT}"])
    lines, f, args = w.function(inner, axis=axis)
    in_axes = f", in_axes=({axis}, 0)" if args else ""
    mapped = f'es.vmap({f}{in_axes}, axis_name="l{level}")'
    return [*lines, f"x = total({_call(mapped, args, 'two(x)')})"], ctx


def vmap_of_stack(w: Writer, ctx: Context) -> Statement:
    """Map over a stack: each lane has one of its modules."""
    if not (stacks := ctx.stacks()):
        return vmap(w, ctx)
    stack, level, name = w.pick(stacks), ctx.level + 1, w.name("m")
    layer = layer_of(ctx, stack, name, level)
    inner = ctx.into(
        level=level,
        x_level=max(level, ctx.x_level),
        axes=ctx.axes | {level},
        steps=ctx.steps if ctx.level else 0,
        nodes=(*ctx.nodes, layer),
        hidden=(*ctx.hidden, stack.path),
        wholes=(*ctx.wholes, whole_of(stack)),
    )
    if w.chance(2) or not ctx.may_write(stack) or stack.spec.cls is Plain:
        lines, f = w.define(inner, f"{name}, x")
        mapped = f'es.vmap({f}, in_axes=(0, 0), axis_name="l{level}")'
        return [*lines, f"x = total({mapped}({stack.text}, two(x)))"], ctx
    only = dataclasses.replace(inner, nodes=(layer,), helpers=(), wholes=())
    text = w.name("m")
    only = dataclasses.replace(only, nodes=(dataclasses.replace(layer, text=text),))
    lines, f = w.define(only, "x")
    mapped = f'ensemble({f}, [{text}], axis_name="l{level}")'
    return [f"{text} = {stack.text}", *lines, f"x = total({mapped}(two(x)))"], ctx


def cond(w: Writer, ctx: Context) -> Statement:
    predicate, level = w.predicate(ctx)
    inner = ctx.into(
        loops=ctx.loops + 1,
        axes=frozenset(),
        min_level=max(ctx.min_level, level),
    )
    lines_f, f = w.whole(inner)
    lines_g, g = w.whole(inner)
    lines = [*lines_f, *lines_g]
    if w.chance(2):
        return [*lines, f"x = es.cond({predicate}, {f}, {g}, x)"], ctx
    index = w.pick(["0", "1", "2"])
    if predicate not in ("True", "False"):
        index = predicate.replace("% 2 == 0", "% 3")
    return [*lines, f"x = es.switch({index}, [{f}, {g}, {f}], x)"], ctx


def nodes_for_scope(w: Writer, ctx: Context, is_small: bool) -> Node | None:
    nodes = ctx.trees()
    if is_small:
        nodes = [n for n in nodes if _size(n.spec) <= 2]
    return w.pick(nodes) if nodes else None


def _size(spec: Spec) -> int:
    return (not spec.children) + sum(map(_size, spec.children))


def loss(
    w: Writer, outside: Context, inner: Context, name: str, tail: str, is_traced: bool
) -> tuple[list[str], str]:
    """The function of a scope, whose model is the first argument of the call.

    A partial may bind a different model, or a value; or it is a method of an object
    that is not a model.
    """
    how = w.pick(["function", "function", "teacher", "value", "method"])
    params, binds, teachers = f"{name}, x", w.name("v"), outside.readable()
    if not is_traced and outside.writable() and w.chance(2):
        teacher = w.pick(outside.writable())
        return w.method(inner, params, (), tail, teacher)
    if how == "method":
        teacher = w.pick(teachers) if teachers and w.chance(2) else None
        if teacher is not None and is_traced:
            teacher = dataclasses.replace(teacher, is_given=True)
        return w.method(inner, params, (), tail, teacher)
    if how == "function" or (how == "teacher" and not teachers):
        return w.define(inner, params, (), tail)
    if how == "value":
        bound, head = w.pick(["0.5", "x"]), (f"x = mix(x, {binds})",)
    else:
        teacher, head = w.pick(teachers), ()
        w.aliased.add(teacher.path)
        alias = dataclasses.replace(teacher, text=binds, assign="")
        inner = dataclasses.replace(inner, nodes=(*inner.nodes, *nodes_of(alias)))
        bound = teacher.text
    if is_by_name := w.chance(2):
        params = f"{params}, *, {binds}"
    else:
        params = f"{binds}, {params}"
    lines, f = w.define(inner, params, head, tail)
    bound = f"{binds}={bound}" if is_by_name else bound
    return lines, f"{w.pick(PARTIALS)}({f}, {bound})"


def returned(w: Writer, ctx: Context) -> Statement:
    """A function that returns its argument: a copy, which has the writes."""
    nodes = ctx.trees()
    if not nodes:
        return once(w, ctx)
    node, name, new = w.pick(nodes), w.name("m"), w.name("m")
    transform = w.pick(["es.jit", "es.checkpoint"])
    alias = dataclasses.replace(node, text=name, assign="")
    inner = ctx.passing(node).into()
    inner = dataclasses.replace(inner, nodes=(*inner.nodes, *nodes_of(alias)))
    lines, f = w.define(inner, f"{name}, x", (), f"(x, {name})")
    lines.append(f"x, {new} = {transform}({f})({node.text}, x)")
    # `es.checkpoint` returns parameters as new arrays, see `scope`.
    is_kept = transform == "es.jit" and not has_bare(node.spec)
    if is_kept and w.is_assignable(ctx, node) and w.chance(2):
        return [*lines, node.assign.replace("NEW", new)], ctx
    kept = dataclasses.replace(
        node, text=new, path=(new,), is_owned=False, level=ctx.level, assign=""
    )
    return lines, dataclasses.replace(ctx, nodes=(*ctx.nodes, *nodes_of(kept)))


def scope(w: Writer, ctx: Context) -> Statement:
    """An inner or outermost scope, on a copy that is returned."""
    what = w.pick(["mutable", "capture", "value_and_grad", "grad"])
    is_grad = what.endswith("grad")
    node = nodes_for_scope(w, ctx, is_grad)
    if node is None:
        return once(w, ctx)
    name, new, y = w.name("m"), w.name("m"), w.name("y")
    if node.is_module and w.chance(4):
        f, x = node.text, "x"
        if node.spec.cls in (Cell, Noise, Net, Both) and not is_grad:
            f = w.pick([f, f"es.vmap({f})"])
            x = "two(x)" if f.startswith("es.vmap") else x
        f = w.pick([f, f"es.jit({f})", f"es.checkpoint({f})"])
        lines = [f"{y} = es.{what}({f})({x})"]
        pick = {"capture": "[0][0]", "grad": "[0]", "value_and_grad": "[0][0]"}
        y = f"{y}{pick.get(what, '[0]')}"
        y = f"weigh({y})" if what == "grad" else f"total({y})" if x != "x" else y
        return [*lines, f"x = mix(x, {y})"], ctx
    wraps = w.pick(["{}", "{}", "es.jit({})", "es.checkpoint({})"])
    has_buffers = w.chance(3)
    tail = "(x, 2 * x)" if what == "value_and_grad" and w.chance(3) else "x"
    run = w.pick(["{}", "{}", "es.jit({})"])
    root = Node(
        name,
        (name,),
        node.spec,
        level=ctx.level,
        grads=ctx.grads + is_grad,
        loops=ctx.loops,
        inside=ctx.inside + (is_grad or run != "{}"),
        is_owned=True,
        has_buffers=has_buffers,
    )
    outside = ctx.passing(node) if node.is_owned else ctx
    inner = outside.into(
        nodes=(*outside.nodes, *nodes_of(root)),
        grads=root.grads,
        axes=frozenset() if is_grad else ctx.axes,
        min_level=0,
        inside=root.inside + (wraps != "{}"),
    )
    is_traced = is_grad or wraps != "{}" or run != "{}"
    lines, f = loss(w, outside, inner, name, tail, is_traced)
    f = wraps.format(f)
    options = ", has_aux=True" if tail != "x" else ""
    options += ", kinds=(es.State, es.Buffer)" if has_buffers else ""
    f = run.format(f"es.{what}({f}{options})")
    call = f"{f}({node.text}, x)"
    g = w.name("g")
    if what == "mutable":
        lines.append(f"{y}, {new} = {call}")
    elif what == "capture":
        lines += [f"({y}, {new}), {g} = {call}", f"{y} = mix({y}, sown({g}))"]
    elif what == "value_and_grad":
        lines += [f"({y}, {new}), {g} = {call}"]
        lines += [f"{y} = {y}[1]"] if tail != "x" else []
        lines += [f"{y} = mix({y}, weigh({g}))"]
    else:
        lines += [f"{g}, {new} = {call}", f"{y} = weigh({g})"]
    lines.append(f"x = mix(x, {y})")
    if ctx.is_main and not node.is_owned and run == "{}":
        # A branch may write state although it is not taken.
        has_branch = any(x in line for line in lines for x in ("es.cond", "es.switch"))
        lines.append(f"own({node.text}, {new}, {not has_branch})")
    if ctx.is_main and node.path == ("model",) and not w.chance(4):
        return [*lines, f"model = {new}"], ctx
    # `es.jit` returns parameters as new arrays, except for those of an `es.Module`, and
    # a scope does not accept different parameters.
    is_kept = not (f.startswith("es.jit") and has_bare(node.spec))
    is_kept &= node.has_buffers or not has_buffers
    if is_kept and w.is_assignable(ctx, node) and w.chance(2):
        return [*lines, node.assign.replace("NEW", new)], ctx
    if node.spec.cls in COUNTERS and node in ctx.writable() and w.chance(2):
        if node.write_level == ctx.level:
            return [*lines, f"{node.text}.n = {new}.n"], ctx
    kept = dataclasses.replace(
        root, text=new, path=(new,), inside=ctx.inside, is_owned=False
    )
    return lines, dataclasses.replace(ctx, nodes=(*ctx.nodes, *nodes_of(kept)))


def helper(w: Writer, ctx: Context) -> Statement:
    """A function that statements in any lane may call."""
    inner = ctx.into(
        depth=min(ctx.depth - 1, 1),
        x_level=ANY,
        axes=frozenset(),
        loops=ctx.loops + 1,
        is_run=False,
        wholes=(),
    )
    lines, f = w.whole(inner)
    if not f.isidentifier():
        name = w.name("f")
        lines, f = [*lines, f"{name} = {f}"], name
    paths = frozenset(n.path for n in inner.nodes)
    new = Helper(f, ctx.grads, paths)
    return lines, dataclasses.replace(ctx, helpers=(*ctx.helpers, new))


SCOPES = (scope,)
TRANSFORMS = (
    once,
    vmap,
    vmap,
    vmap,
    scan,
    cond,
    scope,
    scope,
    fori_loop,
    while_loop,
    helper,
    scan_of_carry,
    vmap_of_stack,
    scan_of_stack,
    twice,
    shared,
    static,
    function_argument,
    two_scopes,
    returned,
)


Program = tuple[Spec, str, Expected | None]


def program(below: Callable[[int], int]) -> Program:
    """A model, a program for it, and the error that it must end in, or `None`."""
    first = Drawing(below)
    fault = first.pick(FAULTS) if first.chance(4) else None
    for _ in range(5):  # not every program has a place for a fault
        found = Writer(below, TRANSFORMS, SCOPES, fault).program()
        if fault is None or found[2] is not None:
            break
    return found


def of_seed(seed: int) -> Program:
    return program(random.Random(seed).randrange)


_BELOW = {n: st.integers(0, n - 1) for n in range(2, 256)}


@st.composite
def programs(draw: Any) -> Program:
    """Programs that hypothesis chooses, and shrinks if one fails."""
    return program(lambda n: draw(_BELOW[n]) if n > 1 else 0)
