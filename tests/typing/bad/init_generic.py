from typing import Generic, TypeVar

import eqx_state as es


_T = TypeVar("_T")


class Box(es.Module, Generic[_T]):
    content: es.State[_T]


Box[int]("hello")  # error
