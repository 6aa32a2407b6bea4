"""An engine fetches what another has cached, on its devices or below them, and the tokens are those without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.cached_pages import CachedPages
from jaxinfer.kv_cache.block_keys import History, block_keys, digests
from jaxinfer.kv_transfer.page_client import PageClient
from jaxinfer.kv_transfer.page_server import PageServer
from jaxinfer.request import RequestContext
from tests.conftest import TINY
from tests.engine.page_audit import assert_all_free
from tests.engine.test_token_equality import SMALL
from tests.engine.workload import workload

PROMPTS = [prompt for prompt in workload()[0] if len(prompt) >= 100][:3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
MODEL = b"of sixteen bytes"


class CachedByLoop:
    """See `CachedSource`."""

    def __init__(self, pages: CachedPages, llm: LLM) -> None:
        self.model, self._pages, self._llm = MODEL, pages, llm

    def read(self, keys: Sequence[bytes]) -> Iterator[np.ndarray]:
        return self._pages.read(keys, self._llm.engine_loop.call)


class Two:
    """An engine that has something, another that can ask it, and what stands between them."""

    def __init__(self, has: LLM, asks: LLM) -> None:
        self.has, self.asks, self.model = has, asks, MODEL
        self.server, self.client = PageServer("127.0.0.1", cached=CachedByLoop(has.engine.cached_pages, has)), PageClient()
        self.port = self.server.port
        self.asks.engine.cached_pages.connect(self._fetch)

    def _fetch(self, address: str, keys: Sequence[bytes], out: np.ndarray) -> int:
        return self.client.fetch("127.0.0.1", int(address), self.model, keys, out, 2.0)

    def history(self, prompt: list[int], namespace: str = "") -> History:
        return History(prompt, self.asks.engine.validate(prompt, GREEDY), RequestContext(namespace=namespace))

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        """The second engine's tokens, and how many pages it fetched."""
        read = self.asks.engine.stats.read_tiers
        assert read is not None
        before = read().num_peer_hits
        self.asks.engine.cached_pages.expect(self.history(prompt), len(prompt), str(self.port))
        (answer,) = self.asks.generate([prompt], GREEDY)
        return answer.outputs[0].token_ids, read().num_peer_hits - before


@pytest.fixture(params=[{}, {"kv_memory": "256KiB", "kv_host_memory": "4MiB"}], ids=["on devices", "and in host memory"])
def two(tiny_model_path: Path, request: pytest.FixtureRequest) -> Iterator[Two]:
    """To compute takes them for ever, so that whatever can be fetched is."""
    made = [LLM(str(tiny_model_path), **TINY | SMALL | {"kv_peers": True} | settings) for settings in (request.param, {})]
    for llm in made:
        tiers = llm.engine._components.prefill.tiers
        assert tiers is not None
        tiers._seconds_to_compute = lambda num_tokens: float("inf")
    two = Two(*made)
    yield two
    two.server.close()
    two.client.close()
    for llm in made:
        llm.engine_loop.call(llm.engine._metrics.update_gauges)
        assert_all_free(llm.engine)
        assert llm.engine.stats.num_compilations_after_ready == 0
        llm.close()


def test_pages_of_another_engine(two: Two) -> None:
    expected = [answer.outputs[0].token_ids for answer in two.has.generate(PROMPTS, GREEDY)]
    for number, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
        found, num_fetched = two.ask(prompt)
        assert found == tokens
        assert num_fetched == (len(prompt) - 1) // 16, number
    # The second time they are here.
    assert two.ask(PROMPTS[0]) == (expected[0], 0)


def test_what_does_not_come_is_computed(two: Two) -> None:
    """It is of another model, not there any more, or nobody answers."""
    expected = [answer.outputs[0].token_ids for answer in two.has.generate(PROMPTS, GREEDY)]
    two.model = b"another model's."
    assert two.ask(PROMPTS[0]) == (expected[0], 0)
    two.model = MODEL
    two.has.engine_loop.call(two.has.engine._components.decode.manager.forget)
    found, num_fetched = two.ask(PROMPTS[1])
    in_memory = two.has.engine.config.cache.kv_host_memory is not None
    assert found == expected[1] and (num_fetched > 0) == in_memory
    two.server.close()
    assert two.ask(PROMPTS[2]) == (expected[2], 0)


def test_another_tenant_finds_nothing(two: Two) -> None:
    two.has.generate(PROMPTS[:1], GREEDY)
    found = {}
    for namespace in ("", "another's"):
        history = two.history(PROMPTS[0], namespace)
        keys = digests(namespace, block_keys(history, 16, len(PROMPTS[0]) // 16))
        found[namespace] = len(list(CachedByLoop(two.has.engine.cached_pages, two.has).read(keys)))
    assert found == {"": len(PROMPTS[0]) // 16, "another's": 0}
