"""`es.Axes`: names for the axes of arrays that another class has annotated, or not."""

from typing import Any, Final

from .._compat import Dims, read_dims


_NO_PATH: Final = """`es.Axes({args})`: say which array below the field has which \
axes, as in `es.Axes(weight="mlp embed")`. For a field that is an array itself, write \
`Float[Array, "mlp embed"]`."""

_NOT_TEXT: Final = """`es.Axes({path}={dims!r})`: the axes of an array are text, as in \
jaxtyping: `es.Axes({path}="mlp embed")`."""

_BAD_TEXT: Final = "`es.Axes({path}={dims!r})`: {reason}."


class Axes:
    """Names for the axes of a layer's arrays, beside the field that holds the layer.

    For layers without names of their own, such as Equinox's. `es.axis_names` reads
    them, and with them `es.sharding`.

    !!! example

        ```python
        from typing import Annotated

        import equinox as eqx
        import eqx_state as es
        import jax.random as jr


        class Block(es.Module):
            up: Annotated[eqx.nn.Linear, es.Axes(weight="mlp embed", bias="mlp")]


        names = es.axis_names(Block(eqx.nn.Linear(2, 8, key=jr.key(0))))
        assert names.up.weight == ("mlp", "embed")
        assert names.up.bias == ("mlp",)
        ```
    """

    __slots__ = ("_texts", "dims")

    # By the path of each array below the field, `layers[0].weight`.
    dims: dict[str, Dims]

    def __init__(self, *args: Any, **paths: str):
        """**Arguments:**

        - `**paths`: for the path of an array below the field, the names of its axes as
            in a jaxtyping annotation. A path that is not an identifier is written
            `es.Axes(**{"layers[0].weight": "mlp embed"})`. With `es.Axes` on a field
            further out, too, that one counts.

        **Raises:**

        - `TypeError`: there is no path, or the axes are not text.
        - `ValueError`: jaxtyping would not accept the text.
        """
        if args or not paths:
            raise TypeError(_NO_PATH.format(args=", ".join(map(repr, args))))
        self._texts = tuple(paths.items())
        self.dims = {}
        for path, text in self._texts:
            if not isinstance(text, str):
                raise TypeError(_NOT_TEXT.format(path=path, dims=text))
            try:
                self.dims[path] = read_dims(text)
            except ValueError as e:
                reason = str(e).rstrip(".")
                raise ValueError(
                    _BAD_TEXT.format(path=path, dims=text, reason=reason)
                ) from None

    def below(self, outer: "Axes") -> "Axes":
        """These axes inside of others, which count where both say something."""
        return Axes(**dict(self._texts) | dict(outer._texts))

    # In an annotation it must have a hash, and two made alike are equal.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axes) and self.dims == other.dims

    def __hash__(self) -> int:
        return hash(frozenset(self.dims.items()))

    def __repr__(self) -> str:
        if all(path.isidentifier() for path in self.dims):
            return f"es.Axes({', '.join(f'{p}={text!r}' for p, text in self._texts)})"
        return f"es.Axes(**{dict(self._texts)!r})"
