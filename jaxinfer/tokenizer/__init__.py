"""Text to token ids and back, from a checkpoint's files. Imports no JAX."""

from jaxinfer.tokenizer.tokenizer import TextTooLong, Tokenizer

__all__ = ["TextTooLong", "Tokenizer"]
