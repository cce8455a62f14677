"""The expected results of random programs, computed in plain Python.

`Reference` defines the functions of `eqx_state` that programs use. Modules are plain
objects, loops are Python's, lanes run one after another, and gradients are finite
differences. All state is in the fields of `Object`s, which a scope copies. Nothing is
traced.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from program_models import PlainKey, split
from program_objects import (
    equal,
    KEYED,
    KEYS,
    Object,
    OBJECTS,
    objects_in,
    parameters,
    plus,
    Scope,
    target,
    Transformed,
)


EPS = 1e-3


class _Wait(Exception):
    """A lane waits for the values that the other lanes pass to a `pmean`."""


class _Int(int):
    """An integer that is a new object, so that a write is a new object, too."""


class Reference:
    """The functions of `eqx_state`, and the values that models are built from."""

    SPLIT, State, Buffer, Rng = (object() for _ in range(4))

    def __init__(self) -> None:
        self.live: list[Object] = []
        self.lanes: dict[str, tuple[list[float], list[float]]] = {}
        self.captures: list[Scope] = []
        self.drawn: set[tuple[int, str]] = set()

    # --- Values, as `program_models.Jax` has them

    def number(self, i: int) -> float:
        return (7 * i % 11 - 5) / 8

    def integer(self, i: int) -> int:
        return _Int(i % 5)

    def key(self, i: int) -> PlainKey:
        return PlainKey(np.array([0, i], np.uint32))

    def new(self, cls: type, *values: Any) -> Object:
        names = list(cls.__annotations__)
        return OBJECTS[cls](self, dict(zip(names, values, strict=True)))

    def stack(self, *trees: Any) -> Any:
        """Stack several trees into one."""
        first = trees[0]
        if isinstance(first, Object):
            names = first.__dict__
            new = type(first)(
                self, {n: self.stack(*(t.__dict__[n] for t in trees)) for n in names}
            )
            object.__setattr__(new, "training", first.training)
            return new
        if isinstance(first, (list, tuple)):
            return type(first)(map(self.stack, *trees))
        if isinstance(first, dict):
            return {n: self.stack(*(t[n] for t in trees)) for n in first}
        if isinstance(first, PlainKey):
            return PlainKey(np.stack([key.data for key in trees]))
        if isinstance(first, (int, float, np.ndarray)):
            return np.stack(trees)
        return first

    # --- Trees

    def copy(
        self,
        tree: Any,
        scope: Scope | None = None,
        leaf: Callable[[Any], Any] = lambda x: x,
        path: str | None = None,
    ) -> Any:
        """A copy for a scope, at `path` or its old path; frozen without a scope."""

        def at(key: str) -> str | None:
            return None if path is None else f"{path}{key}"

        if isinstance(tree, Object):
            new = type(tree)(self, {})
            object.__setattr__(new, "scope", scope)
            object.__setattr__(new, "path", tree.path if path is None else path)
            object.__setattr__(new, "training", tree.training)
            for name, x in tree.__dict__.items():
                key = f".{name}" if path else name
                new.__dict__[name] = self.copy(x, scope, leaf, at(key))
            return new
        if isinstance(tree, (list, tuple)):
            items = (
                self.copy(x, scope, leaf, at(f"[{i}]")) for i, x in enumerate(tree)
            )
            return type(tree)(items)
        if isinstance(tree, dict):
            return {
                n: self.copy(x, scope, leaf, at(f"['{n}']")) for n, x in tree.items()
            }
        return leaf(tree)

    def adopt(self, tree: Any, scope: Scope, path: str) -> Any:
        """The assigned value; modules of other scopes are copied."""
        if isinstance(tree, Object):
            if tree.scope is not scope:
                return self.copy(tree, scope, path=path)
            object.__setattr__(tree, "path", path)
            return tree
        if isinstance(tree, (list, tuple)):
            items = (self.adopt(x, scope, f"{path}[{i}]") for i, x in enumerate(tree))
            return type(tree)(items)
        if isinstance(tree, dict):
            return {n: self.adopt(x, scope, f"{path}['{n}']") for n, x in tree.items()}
        return tree

    def slice(self, tree: Any, i: int) -> Any:
        """One element of a stack; modules in it may be written if the stack may be."""
        if isinstance(tree, Object):
            values = {n: self.slice(x, i) for n, x in tree.__dict__.items()}
            new = type(tree)(self, values)
            object.__setattr__(new, "scope", tree.scope)
            object.__setattr__(new, "path", tree.path)
            object.__setattr__(new, "training", tree.training)
            return new
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.slice(x, i) for x in tree)
        if isinstance(tree, dict):
            return {n: self.slice(x, i) for n, x in tree.items()}
        if isinstance(tree, np.ndarray):
            return tree[i] if tree.ndim > 1 else tree[i].item()
        return tree[i] if isinstance(tree, PlainKey) else tree

    def store(self, stack: Any, slices: list[Any]) -> None:
        """Store the state that was written to the slices in the stack."""
        if isinstance(stack, Object):
            for name in stack.__dict__:
                parts = [x.__dict__[name] for x in slices]
                if any(map(objects_in, parts)):
                    self.store(stack.__dict__[name], parts)
                else:
                    stack.__dict__[name] = self.stack(*parts)
        elif isinstance(stack, (list, tuple)):
            for i, x in enumerate(stack):
                self.store(x, [part[i] for part in slices])
        elif isinstance(stack, dict):
            for name, x in stack.items():
                self.store(x, [part[name] for part in slices])

    # --- Scopes

    def _thread(
        self,
        f: Any,
        args: Any,
        kwargs: Any,
        captures: bool = False,
        reports: bool = False,
    ) -> tuple[Any, Any, Scope]:
        model, call = target(f, args, kwargs)
        outer = _capturing(model) if reports else None
        scope = Scope(captures=captures or outer is not None)
        self.captures.append(scope)
        private = self.copy(model, scope, path="")
        out = self.copy(call(private))
        scope.is_open = False
        self.captures.remove(scope)
        if outer is not None:
            outer.sown.extend(scope.sown)
        return out, self.copy(private), scope

    def mutable(self, f: Any, kinds: Any = State) -> Transformed:
        return Transformed(f, lambda f, *a, **k: self._thread(f, a, k)[:2])

    def capture(self, f: Any, kinds: Any = State) -> Transformed:
        def run(f: Any, *args: Any, **kwargs: Any) -> Any:
            out, model, scope = self._thread(f, args, kwargs, True)
            names = sorted({name for name, _ in scope.sown})
            return (out, model), (names, sum(x for _, x in scope.sown))

        return Transformed(f, run)

    def value_and_grad(
        self, f: Any, has_aux: bool = False, kinds: Any = State
    ) -> Transformed:
        def run(f: Any, *args: Any, **kwargs: Any) -> Any:
            model, call = target(f, args, kwargs)
            num, grads = len(parameters(model)), []
            mark = len(self.live)
            before = [(x, dict(x.__dict__)) for x in self.live]
            sown = [(scope, len(scope.sown)) for scope in self.captures]
            for i in range(num):
                losses = []
                for by in (-EPS, EPS):
                    out, _, _ = self._thread(
                        lambda m: call(m), (self._moved(model, i, by),), {}
                    )
                    losses.append(out[0] if has_aux else out)
                    del self.live[mark:]
                    for x, fields in before:  # a closure may have written them
                        x.__dict__.update(fields)
                    for scope, length in sown:
                        del scope.sown[length:]
                grads.append((losses[1] - losses[0]) / (2 * EPS))
            out = self._thread(f, args, kwargs, reports=True)[:2]
            return out, self._like(model, grads)

        return Transformed(f, run)

    def grad(self, f: Any, kinds: Any = State) -> Transformed:
        def run(f: Any, *args: Any) -> Any:
            (_, model), grads = self.value_and_grad(f)(*args)
            return grads, model

        return Transformed(f, run)

    def _moved(self, model: Any, i: int, by: float) -> Any:
        """A copy in which one number of one parameter is changed."""
        new = self.copy(model)
        owner, name, place, j = parameters(new)[i]
        value = owner.__dict__[name]
        if place is not None:
            owner.__dict__[name] = value = list(value)
            value[place] = plus(value[place], j, by)
        else:
            owner.__dict__[name] = plus(value, j, by)
        return new

    def _like(self, model: Any, grads: list[float]) -> list[Any]:
        """The gradients as one list of numbers per parameter, in order."""
        found: dict[Any, list[float]] = {}
        for (owner, name, place, _), x in zip(parameters(model), grads, strict=True):
            found.setdefault((id(owner), name, place), []).append(x)
        return list(found.values())

    def weigh(self, grads: list[list[float]]) -> float:
        return sum((i + 1) * sum(x) for i, x in enumerate(grads)) / 8

    # --- Transforms

    def _identity(self, f: Any, **_: Any) -> Transformed:
        def run(f: Any, *args: Any, **kwargs: Any) -> Any:
            copies = [self._stand_in(arg) for arg in args]
            before = [dict(x.__dict__) for x in objects_in(copies)]
            out = self.copy(f(*copies, **kwargs))
            self._commit([*args], copies, before)
            return out

        return Transformed(f, run)

    jit = checkpoint = _identity

    def cond(self, pred: Any, f: Any, g: Any, *operands: Any) -> Any:
        return self.switch(0 if pred else 1, [f, g], *operands)

    def switch(self, index: int, branches: Any, *operands: Any) -> Any:
        f = branches[min(max(index, 0), len(branches) - 1)]
        if self.lanes:
            for g in branches:
                if g is not f:
                    self._note_draws(g, operands)
        return self.copy(f(*operands))

    def _note_draws(self, f: Any, operands: Any) -> None:
        """Record the keys that a branch which is not taken would draw from.

        JAX chooses the branch at run time, but `es.vmap` must know while tracing
        whether a key advances: it advances if any branch draws from it.
        """
        mark, before = len(self.live), [(x, dict(x.__dict__)) for x in self.live]
        sown = [(scope, len(scope.sown)) for scope in self.captures]
        f(*operands)
        for x, fields in before:
            if type(x) is KEYED:
                self.drawn |= {
                    (id(x), name) for name in KEYS if x.__dict__[name] != fields[name]
                }
            x.__dict__.update(fields)
        del self.live[mark:]
        for scope, num in sown:
            del scope.sown[num:]

    def _stand_in(self, tree: Any) -> Any:
        """Copy an argument or a carry, to be written if the original may be."""
        if isinstance(tree, Object):
            return self.copy(tree, tree.scope)
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(self._stand_in, tree))
        if isinstance(tree, dict):
            return {name: self._stand_in(x) for name, x in tree.items()}
        return tree

    def _commit(
        self, tree: Any, copy: Any, before: list[dict[str, Any]] | None = None
    ) -> None:
        """Copy the state that was written to the copy of an argument to its modules.

        `before`: the fields of the copy before the call. A field that only the closure
        has written is unchanged in the copy, and stays.
        """
        pairs = zip(objects_in(tree), objects_in(copy), strict=True)
        for i, (x, y) in enumerate(pairs):
            for name, value in y.__dict__.items():
                is_new = before is None or value is not before[i][name]
                if is_new and not objects_in(value):
                    x.__dict__[name] = value

    def scan(
        self, f: Any, init: Any, xs: Any, length: int = 2, reverse: bool = False
    ) -> tuple[Any, Any]:
        carry, ys, slices = self._stand_in(init), [], []
        steps = range(length)
        for i in reversed(steps) if reverse else steps:
            x = self.slice(xs, i)
            carry, y = f(carry, x)
            ys.append(self.copy(y))
            slices.append(x)
        if reverse:
            ys, slices = ys[::-1], slices[::-1]
        self.store(xs, slices)
        return carry, self.stack(*ys)

    def while_loop(self, test: Any, body: Any, init: Any) -> Any:
        carry = self._stand_in(init)
        while test(carry):
            carry = body(carry)
        return carry

    def fori_loop(self, lower: int, upper: int, body: Any, init: Any) -> Any:
        carry = self._stand_in(init)
        for i in range(lower, upper):
            carry = body(i, carry)
        return carry

    def vmap(self, f: Any, in_axes: Any = 0, axis_name: str = "") -> Transformed:
        def run(f: Any, *args: Any) -> Any:
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            return self._map(f, args, axes, [], axis_name)

        return Transformed(f, run)

    def ensemble(self, f: Any, stacks: list[Any], axis_name: str = "") -> Transformed:
        """`es.vmap(f, axes={...: 0})`, if `f` uses only the modules in `stacks`."""
        return Transformed(
            f, lambda f, *args: self._map(f, args, (0,) * len(args), stacks, axis_name)
        )

    def _map(
        self, f: Any, args: Any, axes: Any, stacks: list[Any], axis_name: str
    ) -> Any:
        originals, args = args, [self._stand_in(arg) for arg in args]
        before = [(x, dict(x.__dict__)) for x in self.live]
        sown = [(scope, len(scope.sown)) for scope in self.captures]
        inside = [x for stack in stacks for x in objects_in(stack)]
        keyed = self._split_for_lanes(args, axes, inside)
        kept, keys = {}, {}
        for x, name in keyed:
            new = split(x.__dict__[name])
            kept[id(x), name], keys[id(x), name] = new[0], split(new[1])

        def reset() -> None:
            for x, fields in before:
                x.__dict__.update(fields)

        # An inner `es.vmap` may use the axis name of an outer one.
        outer_lanes, outer_drawn = dict(self.lanes), self.drawn
        self.drawn = set()
        means: list[float] = []
        while True:
            for scope, num in sown:
                del scope.sown[num:]
            lanes, waiting = [], []
            for i in range(2):
                reset()
                for x, name in keyed:
                    x.__dict__[name] = keys[id(x), name][i]
                for x in inside:
                    for name, value in x.__dict__.items():
                        x.__dict__[name] = self.slice_of_field(value, i)
                given_i = [
                    self.slice(arg, i) if axis == 0 else arg
                    for arg, axis in zip(args, axes, strict=True)
                ]
                self.lanes[axis_name] = means, []
                try:
                    out = self.copy(f(*given_i))
                except _Wait as wait:
                    waiting.append(wait.args[0])
                    continue
                lanes.append((out, given_i, [dict(x.__dict__) for x, _ in before]))
            reset()
            if not waiting:
                break
            assert not lanes, "the lanes do not wait for the same"
            means.append(sum(waiting) / 2)
        drawn, self.drawn, self.lanes = self.drawn, outer_drawn, outer_lanes
        for j, (x, old) in enumerate(before):
            for name in old:
                a, b = (fields[j][name] for _, _, fields in lanes)
                if id(x) in {id(y) for y in inside}:
                    x.__dict__[name] = self.stack(a, b) if not objects_in(a) else a
                elif (key := (id(x), name)) in keys and a != b:
                    # Either each lane has drawn from its own key, or may have, or no
                    # lane has.
                    is_drawn = a != keys[key][0] or b != keys[key][1] or key in drawn
                    x.__dict__[name] = kept[key] if is_drawn else old[name]
                else:
                    assert equal(a, b), f"the lanes wrote different values to {name}"
                    x.__dict__[name] = a
        for arg, axis, *slices in zip(
            args, axes, *(g for _, g, _ in lanes), strict=True
        ):
            if axis == 0:
                self.store(arg, slices)
        for original, arg in zip(originals, args, strict=True):
            self._commit(original, arg)
        return self.stack(*(out for out, _, _ in lanes))

    def _split_for_lanes(
        self, args: Any, axes: Any, inside: list[Object]
    ) -> list[tuple[Object, str]]:
        """The keys of which each lane gets its own: their module and field.

        For a module in the arguments, `None` means the same as for an owned module in
        the closure, and rules say it for `es.Rng`. Any other module in the closure is a
        constant.
        """
        axis_of = {id(x): 0 for x in inside}
        for arg, axis in zip(args, axes, strict=True):
            axis_of.update((id(x), axis) for x in objects_in(arg))

        def is_split(x: Object, name: str) -> bool:
            axis = axis_of.get(id(x))
            if isinstance(axis, dict):
                return name != "rng" or axis[self.Rng] is self.SPLIT
            return axis is None and (id(x) in axis_of or _is_owned(x))

        keyed = [x for x in self.live if type(x) is KEYED]
        return [(x, name) for x in keyed for name in KEYS if is_split(x, name)]

    def slice_of_field(self, value: Any, i: int) -> Any:
        return value if objects_in(value) else self.slice(value, i)

    def pmean(self, x: float, axis_name: str) -> float:
        means, seen = self.lanes[axis_name]
        seen.append(x)
        if len(seen) > len(means):
            raise _Wait(x)
        return means[len(seen) - 1]

    # --- The rest of `es`

    def eval(self, model: Any) -> Any:
        new = self.copy(model)
        for x in objects_in(new):
            object.__setattr__(x, "training", False)
        return new


def _is_owned(tree: Any) -> bool:
    return any(x.scope is not None and x.scope.is_open for x in objects_in(tree))


def _capturing(tree: Any) -> Scope | None:
    """The capturing scope that owns the tree."""
    scopes = [x.scope for x in objects_in(tree) if _is_owned(x) and x.scope.captures]
    return scopes[0] if scopes else None
