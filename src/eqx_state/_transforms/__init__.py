"""Gradients, and JAX's transforms with state carried through."""
