"""Optimizers: what changes parameters from step to step."""
