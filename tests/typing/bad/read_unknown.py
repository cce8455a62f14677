import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter

    def __call__(self) -> None:
        print(self.weigth)  # error
