"""One engine prefills, another decodes: pages cross as bytes, chunk by chunk, and the tokens are one engine's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from jaxinfer.engine import Engine
from jaxinfer.kv_transfer.kv_receiver import FirstToken, KVReceiver
from jaxinfer.kv_transfer.kv_sender import KVSender
from jaxinfer.kv_transfer.page_client import PageAddress, PageClient
from jaxinfer.kv_transfer.page_server import PageServer
from jaxinfer.kv_transfer.repaging import Repaging
from jaxinfer.request import FinishReason, OutputDelta, SamplingParams
from tests.conftest import MakeLLM
from tests.engine.page_audit import audit
from tests.engine.workload import workload

PROMPTS, PARAMS = workload()
SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (128,), "kv_peers": True}


def engines(llms: MakeLLM) -> tuple[Engine, Engine]:
    """One on a device of its own, one with two meshes."""
    first, second = llms(**SMALL, prefill_chunk_size=64), llms(prefill_devices=(1,), decode_devices=(2,), **SMALL)
    return first.engine, second.engine


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    server = PageServer("127.0.0.1", token="known to both")
    yield server
    server.close()


@pytest.fixture(scope="module")
def client() -> Iterator[PageClient]:
    client = PageClient(token="known to both")
    yield client
    client.close()


class Pair:
    """Requests that the first engine prefills and the second decodes."""

    def __init__(self, source: Engine, target: Engine, server: PageServer, client: PageClient) -> None:
        self.source, self.target, self.server, self.client = source, target, server, client
        self.receivers: dict[str, KVReceiver] = {}
        self.senders: dict[str, KVSender] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, OutputDelta] = {}

    def add(self, number: int, output_ids: Sequence[int] = ()) -> str:
        return self.add_request(f"r{number}", PROMPTS[number], PARAMS[number], output_ids)

    def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams, output_ids: Sequence[int] = ()) -> str:
        own, asked = self.source.page_spec, self.target.page_spec
        sender = KVSender(0, None if own == asked else Repaging(own, asked))
        address = PageAddress("127.0.0.1", self.server.port, uuid.uuid4().bytes)
        self.server.add(address.handoff_id, sender)
        start = partial(self.client.pull, address)
        receiver = KVReceiver(start, asked)
        self.senders[request_id], self.receivers[request_id], self.tokens[request_id] = sender, receiver, []
        for engine, remote in ((self.source, sender), (self.target, receiver)):
            engine.add_request(request_id, list(prompt), params, remote=remote, output_ids=output_ids)
        return request_id

    def step(self) -> None:
        if self.source.has_work:
            for delta in self.source.step():
                assert delta.finish_reason is FinishReason.HANDED_OVER
                usage = delta.device_usage
                assert usage is not None
                logprob = delta.logprobs[0] if delta.logprobs else None
                first = FirstToken(delta.token_ids[0], logprob, delta.prompt_logprobs or (), delta.cached_tokens, usage.queue_seconds)
                self.receivers[delta.request_id].end(first)
        if self.target.has_work:
            for delta in self.target.step():
                self.tokens[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    self.ended[delta.request_id] = delta

    def run(self) -> None:
        while self.source.has_work or self.target.has_work:
            self.step()


def check_all_free(*of: Engine) -> None:
    for engine in of:
        engine._metrics.update_gauges()
        audit(engine)
        assert engine.stats.prefill_pages_used == engine.stats.decode_pages_used == 0
        assert engine.stats.num_compilations_after_ready == 0


def test_tokens_are_one_engines(llms: MakeLLM, expected: list[list[list[int]]], server: PageServer, client: PageClient) -> None:
    pair = Pair(*engines(llms), server, client)
    for number in range(len(PROMPTS)):
        pair.add(number)
    pair.run()
    assert [[pair.tokens[f"r{number}"]] for number in range(len(PROMPTS))] == expected
    assert {delta.finish_reason for delta in pair.ended.values()} <= {FinishReason.LENGTH, FinishReason.STOP}
    check_all_free(pair.source, pair.target)


@pytest.mark.parametrize(
    ("of_source", "of_target"),
    [
        ({"decode_devices": (0,), "prefill_devices": (0,), "page_size": 4}, {"prefill_parallel": "tp=2", "page_size": 24}),
        (
            {"prefill_parallel": "tp=2,pp=2", "page_size": 32},
            {"prefill_devices": (4,), "decode_devices": (5, 6), "decode_parallel": "pp=2"},
        ),
    ],
    ids=["pages of 4 to 24, one device to two", "pages of 32 to 16, 2x2 devices to one and two stages"],
)
def test_page_sizes_and_layouts_differ(
    llms: MakeLLM, expected: list[list[list[int]]], server: PageServer, client: PageClient, of_source: Any, of_target: Any
) -> None:
    source, target = llms(**SMALL | of_source, prefill_chunk_size=64), llms(**SMALL | of_target)
    num_received = []
    for numbers in (range(len(PROMPTS)), [14], [14]):  # the last time the target knows its prefix
        pair = Pair(source.engine, target.engine, server, client)
        for number in numbers:
            pair.add(number)
        pair.run()
        assert [[pair.tokens[f"r{number}"]] for number in numbers] == [expected[number] for number in numbers]
        assert target.engine.stats.num_taken_over == 0
        num_received.append(target.engine.stats.num_pages_received)
    assert num_received[2] - num_received[1] <= 1
    check_all_free(pair.source, pair.target)


def test_a_sequence_that_ends_with_the_token_that_came_with_its_pages(
    llms: MakeLLM, expected: list[list[list[int]]], server: PageServer, client: PageClient
) -> None:
    """As after a migration just before the end."""
    pair = Pair(*engines(llms), server, client)
    for number in (14, 10, 3):
        pair.add(number, expected[number][0][:-1])
    pair.run()
    assert [pair.tokens[f"r{number}"] for number in (14, 10, 3)] == [expected[number][0][-1:] for number in (14, 10, 3)]
    check_all_free(pair.source, pair.target)


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_source_that_dies_costs_time_and_no_token(
    llms: MakeLLM, expected: list[list[list[int]]], server: PageServer, client: PageClient, when: str
) -> None:
    """Its pages come not at all, in part, or all but the first token does not."""
    pair = Pair(*engines(llms), server, client)
    chosen = [14, 10, 3]
    for number in chosen:
        pair.add(number)
    for _ in range({"before": 0, "between": 2, "after": 3}[when]):
        pair.step()
    for number in chosen:
        pair.source.abort(f"r{number}")
        pair.receivers[f"r{number}"].fail("the prefill worker is gone")
    pair.run()
    assert [[pair.tokens[f"r{number}"]] for number in chosen] == [expected[number] for number in chosen]
    check_all_free(pair.source, pair.target)


def test_whoever_leaves_at_any_moment_leaves_no_page(llms: MakeLLM, server: PageServer, client: PageClient) -> None:
    pair = Pair(*engines(llms), server, client)
    for number in range(12):
        pair.add(number)
    for number in range(12):
        pair.step()
        pair.target.abort(f"r{number}")
        if number % 2:
            pair.source.abort(f"r{number}")
    while pair.source.has_work:  # whose deltas nobody waits for
        pair.source.step()
    pair.run()
    check_all_free(pair.source, pair.target)


def test_pages_of_another_shape_are_refused(llms: MakeLLM, expected: list[list[list[int]]]) -> None:
    _, target = engines(llms)
    other = replace(target.page_spec, page_size=32)
    asked: list[Sequence[int]] = []
    receiver = KVReceiver(lambda _, places: asked.append(places), other)
    target.add_request("r0", PROMPTS[4], PARAMS[4], remote=receiver)
    tokens: list[int] = []
    while target.has_work:
        for delta in target.step():
            tokens += delta.token_ids
    assert not asked
    assert [tokens] == expected[4]
