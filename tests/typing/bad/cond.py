import eqx_state as es


def one() -> int:
    return 1


def run(flag: bool) -> str:
    return es.cond(flag, one, one)  # error
