"""Functions on pytrees: the one traversal, and everything that is built on it."""
