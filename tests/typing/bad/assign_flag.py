import eqx_state as es


class Layer(es.Module):
    def __call__(self) -> None:
        self.training = "hello"  # error
