"""Without torch there is nothing here to collect: `make test` runs in an environment that has none."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["test_live.py", "test_random_models.py", "test_embeddings.py"]
