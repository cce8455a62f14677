import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter


class Other(es.Module):
    weight: es.Parameter


def run(layer: Layer) -> Other:
    return layer.init(42).train().eval()  # error
