"""Imported by `test_runtime_typing.py` under the import hook of jaxtyping."""
