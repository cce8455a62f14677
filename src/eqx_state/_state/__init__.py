"""The mutable scope: writing, initializing, and `es.Module`."""
