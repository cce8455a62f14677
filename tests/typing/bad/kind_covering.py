import eqx_state as es


class Ema(es.TreePart, covering="yes"): ...  # error
