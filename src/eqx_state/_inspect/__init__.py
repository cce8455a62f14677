"""Looking into a model: sown values, outputs of layers, NaNs, tables."""
