"""Arrays by name: dictionaries, files, and the weights of PyTorch models."""
