"""Optimizers, with their state and parameter groups."""
