"""A model's architecture as plain records: sizes and choices from config.json, attention heads on a mesh, shapes of
known models. Imports no JAX."""
