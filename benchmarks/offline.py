"""`python -m benchmarks.offline`: this engine beside Hugging Face transformers alone, decode and prefill without a
server. A short form of `python -m benchmarks.peers`, with the same options."""

from __future__ import annotations

import sys

from benchmarks.peers.__main__ import main

if __name__ == "__main__":
    main(["--engines", "jaxinfer", "transformers", "--parts", "rates", *sys.argv[1:]])
