import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter

    def __call__(self) -> None:
        self.weight = "hello"  # error
