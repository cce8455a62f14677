"""Names of axes, and shardings that are chosen by them."""
