import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter


Layer(es.Initializer(lambda key: "hello"))  # error
