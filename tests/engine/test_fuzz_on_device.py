"""Random adds and aborts on the real engine, with so few pages that sequences are preempted: the fuzz of the host half, with arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.request import RequestContext, RequestOutput
from tests.engine.page_audit import assert_all_free, audit
from tests.engine.test_token_equality import LAYOUTS, chosen
from tests.engine.workload import alone, workload

WORKLOAD = workload()
PROMPTS, PARAMS = [prompt[:60] for prompt in WORKLOAD[0]], [replace(params, max_tokens=60) for params in WORKLOAD[1]]


@pytest.fixture(scope="module")
def expected(llms):
    """Of each prompt, alone."""
    return [tokens for [tokens] in alone(llms(), PROMPTS, PARAMS)]


@pytest.mark.usefixtures("prefills_are_read_soon")
@pytest.mark.parametrize("layout", chosen(["two devices", "one device", "chunks of 50"]))
def test_random_adds_and_aborts_lose_no_page_and_change_no_token(llms, expected, layout):
    engine = llms(**LAYOUTS.get(layout, {})).engine
    random = np.random.default_rng(3)
    preempted, done = engine.stats.num_preemptions, 0
    followed: dict[str, tuple[int, RequestOutput]] = {}
    number = 0
    while number < 150 or engine.has_work:
        if number < 150 and random.random() < 0.3:
            which, request_id = int(random.integers(0, len(PROMPTS))), f"f{number}"
            n = int(random.choice([1, 1, 3]))
            context = RequestContext(tenant=str(random.choice(["a", "b"])), priority=int(random.choice([0, 0, 20])))
            engine.add_request(request_id, PROMPTS[which], replace(PARAMS[which], n=n), context)
            followed[request_id] = which, RequestOutput.empty(request_id, None, PROMPTS[which], replace(PARAMS[which], n=n))
            number += 1
        if followed and random.random() < 0.08:
            gone = str(random.choice(list(followed)))
            assert engine.abort(gone)
            del followed[gone]
            audit(engine)
        for delta in engine.step():
            which, output = followed[delta.request_id]  # no delta comes of what is gone
            output.add(delta)
            if output.is_finished:
                assert output.outputs[0].token_ids == expected[which]
                del followed[delta.request_id]
                done += 1
        audit(engine)
    assert not followed
    assert done > 60
    assert engine.stats.num_preemptions - preempted > 10
    assert_all_free(engine)
