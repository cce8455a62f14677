import eqx_state as es


class Cache(es.State): ...


class Layer(es.Module):
    cache: Cache

    def __call__(self) -> None:
        self.cache = "hello"  # error
