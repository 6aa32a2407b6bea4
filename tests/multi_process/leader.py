"""Process 0 of two, run by the tests: `python -m tests.multi_process.leader SETTINGS`, which are JSON. Writes the workload's tokens to the file
that `out` names, then goes on generating until the other process is gone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from jaxinfer.config import ConfigError
from jaxinfer.engine import Engine
from jaxinfer.kv_transfer.kv_receiver import FirstToken, KVReceiver
from jaxinfer.kv_transfer.kv_sender import KVSender
from jaxinfer.kv_transfer.page_client import PageAddress, PageClient
from jaxinfer.kv_transfer.page_server import PageServer
from jaxinfer.llm import LLM
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.request import RequestContext, SamplingParams
from tests.engine.workload import tokens_of, workload

FEW = 12  # tokens: a step of two processes takes 50 ms


def handed_over(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    """Tokens of requests whose pages leave this engine for the network, and come back to it from there."""
    server, client = PageServer("127.0.0.1"), PageClient()
    receivers, tokens = [], []
    for number, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        address = PageAddress("127.0.0.1", server.port, number.to_bytes(16, "little"))
        sender, receiver = KVSender(), KVReceiver(partial(client.pull, address), engine.page_spec)
        server.add(address.handoff_id, sender)
        receivers.append(receiver)
        tokens.append([])
        # Other namespaces: what one half puts into the prefix cache the other must not find.
        for half, remote in (("prefill", sender), ("decode", receiver)):
            engine.add_request(f"{half} {number}", prompt, sampling, RequestContext(namespace=half), remote)
    while engine.has_work:
        for delta in engine.step():
            half, _, number = delta.request_id.partition(" ")
            if half == "prefill":
                receivers[int(number)].end(FirstToken(delta.token_ids[0]))
            else:
                tokens[int(number)] += delta.token_ids
    assert engine.stats.num_pages_received > 0 == engine.stats.num_taken_over
    server.close()
    return [[of_prompt] for of_prompt in tokens]


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
    found["handed_over"] = handed_over(llm.engine, prompts[:6], few[:6])
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
