import eqx_state as es


class Cache(es.State): ...


class Layer(es.Module):
    cache: Cache


Layer(cache="hello")  # error
