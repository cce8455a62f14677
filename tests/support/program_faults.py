"""Statements that `eqx_state` must reject at any position in a random program.

Each function writes a statement that must raise an error, if the position allows it.
"""

from dataclasses import FrozenInstanceError

from program_models import (
    Both,
    Cell,
    COUNTERS,
    Net,
    Noise,
    NUMBERS,
    Phase,
    Tally,
)
from program_writer import Context, Expected, Node, Writer

import eqx_state as es


Fault = tuple[list[str], Expected | None]
NO_FAULT: Fault = [], None


def _of(w: Writer, ctx: Context, *classes: type) -> Node | None:
    nodes = [n for n in ctx.writable() if n.spec.cls in classes]
    return w.pick(nodes) if nodes else None


def writes_parameter(w: Writer, ctx: Context) -> Fault:
    if (node := _of(w, ctx, Cell, Noise)) is None:
        return NO_FAULT
    return [f"{node.text}.w = 1.0"], ((FrozenInstanceError,), r"\.w`")


def writes_float(w: Writer, ctx: Context) -> Fault:
    if (node := _of(w, ctx, *COUNTERS)) is None:
        return NO_FAULT
    return [f"{node.text}.n = 0.5"], ((ValueError,), r"n`")


def writes_shape(w: Writer, ctx: Context) -> Fault:
    if (node := _of(w, ctx, *NUMBERS)) is None or node.level != ctx.level:
        return NO_FAULT
    return [f"{node.text}.s = two(x)"], ((ValueError,), r"s`")


def writes_too_big(w: Writer, ctx: Context) -> Fault:
    if (node := _of(w, ctx, *COUNTERS)) is None:
        return NO_FAULT
    return [f"{node.text}.n = {w.pick(['2**40', 'BIG'])}"], ((ValueError,), r"n`")


def writes_lane(w: Writer, ctx: Context) -> Fault:
    if (node := _of(w, ctx, *NUMBERS)) is None or ctx.x_level <= node.write_level:
        return NO_FAULT
    return [f"{node.text}.s = mix(0.5, x)"], ((ValueError,), r"s`")


def writes_buffer(w: Writer, ctx: Context) -> Fault:
    if (node := _of(w, ctx, Tally)) is None or node.has_buffers:
        return NO_FAULT
    return [f"{node.text}.k = 0.5"], ((FrozenInstanceError,), r"\.?k`")


def hides_in_object(w: Writer, ctx: Context) -> Fault:
    """Write to a module in a plain object, into which no transform looks."""
    if (node := _of(w, ctx, *COUNTERS)) is None:
        return NO_FAULT
    cls, t = w.name("T"), w.name("t")
    run = w.pick(["es.jit({})(x)", "es.checkpoint({})(x)", "es.vmap({})(two(x))"])
    lines = [
        f"class {cls}:",
        "    def count(self, x):",
        "        self.m.n = self.m.n + 1",
        "        return x",
        f"{t} = {cls}()",
        f"{t}.m = {node.text}",
        run.format(f"{t}.count"),
    ]
    return lines, ((es.TraceError,), r"n`")


def writes_frozen(w: Writer, ctx: Context) -> Fault:
    nodes = [n for n in ctx.readable() if not n.is_owned and n.spec.cls in COUNTERS]
    if not nodes:
        return NO_FAULT
    text = w.pick(nodes).text
    return [f"{text}.n = {text}.n + 1"], ((FrozenInstanceError,), r"\.n`")


def plain_transform(w: Writer, ctx: Context) -> Fault:
    if (node := _of(w, ctx, Cell, Tally, Both, Net)) is None:
        return NO_FAULT
    transform = w.pick(["jax.jit", "jax.checkpoint"])
    return [f"x = {transform}(lambda x: {node.text}(x))(x)"], (
        (es.TraceError,),
        r"es\.",
    )


def writes_phase(w: Writer, ctx: Context) -> Fault:
    node = _of(w, ctx, Phase)
    if node is None or node.inside == ctx.inside:
        return NO_FAULT
    errors = (ValueError, TypeError, es.TraceError, FrozenInstanceError)
    # It must be a new value: assigning an equal one is not an error.
    return [f"{node.text}.phase = 'hot'"], (errors, "phase")


def returns_function(w: Writer, ctx: Context) -> Fault:
    if (node := _of(w, ctx, *COUNTERS, Noise)) is None:
        return NO_FAULT
    name = w.name("m")
    lines = [f"{name} = {node.text}", f"es.jit(lambda x: lambda y: {name}.peek(y))(x)"]
    return lines, ((ValueError, TypeError, es.TraceError), "es.jit")


def in_two_places(w: Writer, ctx: Context) -> Fault:
    nodes = [n for n in ctx.readable() if n.spec.cls in COUNTERS]
    if not nodes:
        return NO_FAULT
    text = w.pick(nodes).text
    runs = ["es.mutable({})", "es.grad({})", "es.jit(es.mutable({}))"]
    run = w.pick(runs)
    run = run.format("lambda ms, x: ms[0](ms[1](x))")
    return [f"{run}([{text}, {text}], x)"], ((ValueError,), r"\[0\]")


def writes_both_ways(w: Writer, ctx: Context) -> Fault:
    """Write through an argument and through the closure."""
    stacks = [n for n in ctx.stacks() if ctx.may_write(n) and n.spec.cls in COUNTERS]
    if stacks and w.chance(2):
        node = w.pick(stacks)
        run = w.pick(["es.scan({}, x, {})", "es.vmap({}, (None, 0))(x, {})"])
    elif (node := _of(w, ctx, Cell, Tally)) is not None and node.level == ctx.level:
        run = w.pick(["es.jit({})(x, {})", "es.checkpoint({})(x, {})"])
    else:
        return NO_FAULT
    name, text = w.name("f"), node.text
    lines = [
        f"def {name}(x, m):",
        f"    {text}.n = {text}.n + 1",
        "    return m(x), None",
        run.format(name, text),
    ]
    return lines, ((ValueError,), "reached twice")


def covers_a_write(w: Writer, ctx: Context) -> Fault:
    """Write through the closure, under a transform that returns a copy without it."""
    if (node := _of(w, ctx, *COUNTERS)) is None:
        return NO_FAULT
    run, params, out = w.pick(COVERING)
    name, text = w.name("f"), node.text
    lines = [
        f"def {name}({params}):",
        f"    {text}.n = {text}.n + 1",
        f"    return {out}",
        run.format(name, text),
    ]
    return lines, ((ValueError,), "was written through the closure")


# A call of a function with a module, the parameters of the function, and its output.
COVERING = (
    ("es.scan({}, {}, two(x))", "m, y", "m, y"),
    ("es.while_loop(lambda m: False, {}, {})", "m", "m"),
    ("es.fori_loop(0, 2, {}, {})", "i, m", "m"),
    ("es.jit({})({}, x)", "m, x", "x, [m]"),
    ("es.checkpoint({})({})", "m", "m"),
    ("es.cond(x > 0, {0}, {0}, {1})", "m", "m"),
    ("es.vmap({}, (None, 0))({}, two(x))", "m, x", "m, x"),
    ("es.vjp({}, {}, x)", "m, x", "x, m"),
    ("es.mutable({})({}, x)", "m, x", "m(x)"),
    ("es.capture({})([{}], x)", "m, x", "x"),
    # Each of both transforms has the argument and the closure.
    ("es.mutable(es.jit({}))({}, x)", "m, x", "x"),
)


def binds_the_model(w: Writer, ctx: Context) -> Fault:
    """A partial binds the model, and the call has no argument for it."""
    if not (nodes := ctx.readable()):
        return NO_FAULT
    partial = w.pick(["ft.partial", "eqx.Partial", "jtu.Partial"])
    scope = w.pick(["es.mutable", "es.capture", "es.grad", "es.value_and_grad"])
    f = f"{partial}(lambda m, x: m.peek(x), {w.pick(nodes).text})"
    run = w.pick(["{0}({1})", "{0}(es.checkpoint({1}))", "es.jit({0}({1}))"])
    f = run.format(scope, f)
    return [f"{f}(x)"], ((TypeError,), "is a partial that binds the")


FAULTS = (
    writes_parameter,
    writes_buffer,
    writes_float,
    writes_shape,
    writes_too_big,
    writes_lane,
    writes_frozen,
    plain_transform,
    hides_in_object,
    writes_phase,
    returns_function,
    in_two_places,
    writes_both_ways,
    covers_a_write,
    binds_the_model,
)
