"""`python -m benchmarks.offline`: this engine beside Hugging Face transformers alone, decode and prefill without a server: the short
way to `python -m benchmarks.peers`, whose options it takes too."""

from __future__ import annotations

import sys

from benchmarks.peers.__main__ import main

if __name__ == "__main__":
    main(["--engines", "jaxinfer", "transformers", "--parts", "rates", *sys.argv[1:]])
