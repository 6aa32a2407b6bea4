"""The app of tests/server."""

from tests.server.conftest import backend, client, config, named_testserver, tokenizer

__all__ = ["backend", "client", "config", "named_testserver", "tokenizer"]
