from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    weight: Array = es.field(kind=es.Parameter)


Layer()  # error
