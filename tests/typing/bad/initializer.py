import eqx_state as es


es.Initializer(0.1)  # error
