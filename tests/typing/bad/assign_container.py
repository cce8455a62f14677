from jaxtyping import Array

import eqx_state as es


class Layer(es.Module):
    stats: es.BatchStat[dict[str, Array]]

    def __call__(self) -> None:
        self.stats = {"mean": "hello"}  # error
