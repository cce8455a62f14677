import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter


Layer(None)  # error
