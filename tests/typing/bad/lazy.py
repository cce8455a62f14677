import equinox as eqx

import eqx_state as es


class Layer(es.Module):
    net: es.Buffer[eqx.nn.MLP]

    def __init__(self) -> None:
        self.net = es.lazy(eqx.nn.Linear, 3, 4)  # error
