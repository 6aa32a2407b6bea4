"""Process 0 of two, run by the tests: `python -m tests.multi_process.leader SETTINGS`, which are JSON. Writes the workload's tokens to the file
that `out` names, then goes on generating until the other process is gone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from jaxinfer.config import ConfigError
from jaxinfer.llm import LLM
from jaxinfer.multi_process.peer_failure import ProcessLostError
from tests.engine.workload import tokens_of, workload

FEW = 12  # tokens: a step of two processes takes 50 ms


def main() -> None:
    settings = json.loads(sys.argv[1])
    out = Path(settings.pop("out"))
    llm = LLM(**settings)
    prompts, params = workload()
    few = [replace(p, max_tokens=FEW) for p in params]
    found = {name: tokens_of(llm.generate(prompts[:15], few[:15])) for name in ("tokens", "again")}
    short, longer = [prompt[:15] for prompt in prompts], [replace(p, max_tokens=45) for p in params]
    found["long"] = tokens_of(llm.generate(short, longer))
    scored = llm.generate([prompts[13]], replace(params[0], max_tokens=5, logprobs=2, prompt_logprobs=1))[0]
    found["prompt_logprobs"] = [told.logprob for told in scored.prompt_logprobs[1:]]
    found["siblings"] = tokens_of(llm.generate(prompts[:9], [replace(p, n=3) for p in few[:9]]))
    stats = llm.engine.stats
    found |= {
        name: getattr(stats, name) for name in ("num_preemptions", "num_pages_moved", "num_cached_tokens", "num_compilations_after_ready")
    }
    try:
        llm.logits(prompts[0])
    except ConfigError as error:
        found["logits"] = str(error)
    out.write_text(json.dumps(found))
    print("answered", flush=True)
    try:
        while True:
            llm.generate(prompts, params)
    except ProcessLostError as error:
        print(f"lost: {error}", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
