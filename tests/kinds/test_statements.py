"""String annotations mean what the class statement around them means."""

import gc
import sys
import textwrap
import types
import weakref

import jax.numpy as jnp
import pytest

import eqx_state as es


# A different kind of the same name, and code that runs while a class is created.
ELSEWHERE = """
import eqx_state as es

class Memory(es.Buffer): ...

class Base(es.Module):
    def __init_subclass__(cls, **kwargs):
        Memory = es.Rng
        super().__init_subclass__(**kwargs)

class Meta(type(es.Module)):
    def __new__(meta, *args, **kwargs):
        return super().__new__(meta, *args, **kwargs)

class WithMeta(es.Module, metaclass=Meta): ...

def rebuilt(cls):
    body = {k: getattr(cls, k) for k in KEPT}
    return type(cls)(cls.__name__, cls.__bases__, body)

KEPT = ["__module__", "__qualname__", "__annotations__"]

def called(f):
    return f()
"""

HEADER = """
from __future__ import annotations
import types
import eqx_state as es
from elsewhere import *
from elsewhere import Base, WithMeta, called, rebuilt
"""


@pytest.fixture
def run(monkeypatch):
    """Runs the source of a module; returns the kind of `Net.m` and the module."""

    def run(source):
        for name, text in [("elsewhere", ELSEWHERE), ("model", HEADER + source)]:
            module = types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(textwrap.dedent(text), name, "exec"), vars(module))
        [part] = es.parts(module.Net(jnp.ones(1)))
        return part.kind, module

    return run


MODULES = {
    "registry": """
        class Memory(es.State): ...
        class Net(Base):
            m: Memory
        """,
    "metaclass": """
        class Memory(es.State): ...
        class Net(WithMeta):
            m: Memory
        """,
    "decorator": """
        class Memory(es.State): ...
        @rebuilt
        class Net(Base):
            m: Memory
        """,
    "decorated later": """
        class Memory(es.State): ...
        class Net(es.Module):
            m: Memory
        def call():
            return rebuilt(Net)
        Net = called(call)
        """,
    "defined later": """
        class Net(Base):
            m: Memory
        class Memory(es.State): ...
        """,
    "container": """
        class Memory(es.State): ...
        class Net(Base):
            m: list[Memory] | Memory
        """,
    "own body": """
        class Net(Base):
            class Memory(es.State): ...
            m: Memory
        Memory = Net.Memory
        """,
    "generic": """
        import typing
        T = typing.TypeVar("T")
        class Memory(es.State): ...
        class Box(Base, typing.Generic[T]):
            m: T
        class Net(Box["Memory"]): ...
        """,
    "function": """
        class Memory(es.Rng): ...
        def make():
            class Memory(es.State): ...
            class Net(Base):
                m: Memory
            return Net, Memory
        Net, Memory = called(make)
        """,
    "generic in a function": """
        import typing
        T = typing.TypeVar("T")
        class Memory(es.Rng): ...
        class Box(Base, typing.Generic[T]):
            m: T
        def make():
            class Memory(es.State): ...
            class Net(Box["Memory"]): ...
            return Net, Memory
        Net, Memory = called(make)
        """,
    "functions": """
        def make(Memory):
            def inner():
                @rebuilt
                class Net(WithMeta):
                    m: Memory
                return Net
            return called(inner)
        class Memory(es.State): ...
        Net = make(Memory)
        """,
    "global": """
        class Memory(es.State): ...
        def make():
            global Net
            class Net(Base):
                m: Memory
        called(make)
        """,
    "returned function": """
        class Memory(es.State): ...
        def outer():
            def make():
                class Net(Base):
                    m: Memory
                return Net
            return make
        Net = outer()()
        """,
    "returned method": """
        class Memory(es.State): ...
        class Maker:
            @classmethod
            def outer(cls):
                def make():
                    class Net(Base):
                        m: Memory
                    return Net
                return make
        Net = Maker.outer()()
        """,
    "outer class": """
        class Outer:
            class Memory(es.Rng): ...
            class Net(Base):
                m: Memory
        class Memory(es.State): ...
        Net = Outer.Net
        """,
    "only in the outer class": """
        del globals()["Memory"]
        class Outer:
            class Memory(es.State): ...
            class Net(Base):
                m: Memory
        Net, = [Outer.Net]
        class Seen(Outer.Net): ...
        kind = Outer.Memory
        """,
}


@pytest.mark.parametrize("source", MODULES.values(), ids=MODULES)
def test_names_are_those_of_the_statement(source, run):
    kind, module = run(textwrap.dedent(source))
    assert kind is (vars(module).get("kind") or module.Memory)
    assert issubclass(kind, es.State)


# There is a kind of the same name in the module, and it is not meant.
ERRORS = {
    "assigned later": """
        class Memory(es.Rng): ...
        def make():
            class Net(Base):
                m: Memory
            class Memory(es.State): ...
            return Net
        Net = make()
        """,
    "returned function": """
        class Memory(es.Rng): ...
        def outer():
            class Memory(es.State): ...
            def make():
                class Net(Base):
                    m: Memory
                return Net
            return make
        Net = outer()()
        """,
    "lost function": """
        class Memory(es.Rng): ...
        def outer():
            class Memory(es.State): ...
            def make():
                class Net(Base):
                    m: Memory
                return Net
            return make
        make = outer()
        del outer
        Net = make()
        """,
    "new_class": """
        class Memory(es.Rng): ...
        def fill(body):
            body["__annotations__"] = {"m": "Memory"}
        Net = types.new_class("Net", (es.Module,), {}, fill)
        """,
    "new_class in a function": """
        class Memory(es.Rng): ...
        def make():
            class Memory(es.State): ...
            def fill(body):
                body["__annotations__"] = {"m": "Memory"}
                body["__module__"] = __name__
            return types.new_class("Net_", (es.Module,), {}, fill)
        Net = make()
        """,
}


@pytest.mark.parametrize("source", ERRORS.values(), ids=ERRORS)
def test_a_name_that_may_mean_a_different_kind_is_an_error(source, run):
    with pytest.raises(TypeError, match=r"Net_?\.m` decides .*cannot be resolved"):
        run(textwrap.dedent(source))


def test_no_frame_is_kept():
    class Data:
        pass

    def make(data):
        class Net(es.Module):
            m: "es.State"

        return Net, weakref.ref(data)

    gc.disable()
    try:
        _, data = make(Data())
        assert data() is None
    finally:
        gc.enable()
