"""Looking into a model: what layers sow, and a model as a table."""
