"""The declarations in annotations and classes."""
