"""Tool calls in a model's text: formats as data, the parser and the grammar made of them. No JAX, no FastAPI."""
