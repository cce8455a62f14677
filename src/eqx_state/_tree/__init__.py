"""Functions on pytrees: the one traversal, and all that stands on it."""
