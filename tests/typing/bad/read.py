import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter

    def __call__(self) -> str:
        return self.weight  # error
