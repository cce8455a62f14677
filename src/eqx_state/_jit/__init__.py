"""`es.jit`."""
