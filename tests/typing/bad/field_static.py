import eqx_state as es


class Layer(es.Module):
    size: int = es.field(static="yes")  # error
