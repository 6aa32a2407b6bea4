"""A router, a worker of both roles and one that decodes, as processes. Whoever is killed or stopped, every client's stream goes on unbroken, with the
tokens of an undisturbed engine."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from jaxinfer.kv_transfer.kv_sender import LEASE_SECONDS
from jaxinfer.request import CompletionOutput, SamplingParams
from tests.conftest import MakeLLM
from tests.server.workers.cluster import Cluster, Stream
from tests.server.workers.trace_collector import TraceCollector, collecting

pytestmark = pytest.mark.processes

ROUTERS = ("router", "second router")
NUM_TOKENS = 300
RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(0, 500, length).tolist() for length in (5, 150, 64, 200, 90, 128)]
KINDS = [
    {},
    {"temperature": 0.9, "seed": 7},
    {},
    {"temperature": 1.1, "seed": -3, "frequency_penalty": 0.5},
    {},
    {"temperature": 0.7, "seed": 2},
]
ROUNDING = 1e-5  # more than a token's scores differ by where its context is computed in one piece or token by token


@pytest.fixture(scope="module")
def expected(llms: MakeLLM) -> list[list[int]]:
    """Tokens that no rounding changes: a tie within it would go one way here and the other way after a migration."""

    def generate(factor: float) -> list[CompletionOutput]:
        kinds = [kind | {"logprobs": 2, "temperature": kind.get("temperature", 0.0) * factor} for kind in KINDS]
        params = [SamplingParams(**kind, max_tokens=NUM_TOKENS, ignore_eos=True) for kind in kinds]
        return [output.outputs[0] for output in llms().generate(PROMPTS, params)]

    outputs = generate(1.0)
    for output, kind in zip(outputs, KINDS, strict=True):
        if not kind:
            assert min(entry.top[0][1] - entry.top[1][1] for entry in output.logprobs or ()) > ROUNDING
    for factor in (1.0 - ROUNDING, 1.0 + ROUNDING):
        assert [output.token_ids for output in generate(factor)] == [output.token_ids for output in outputs]
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory, collector: TraceCollector) -> Iterator[Cluster]:
    cluster = Cluster(tiny_model_path, tmp_path_factory.mktemp("cluster"), flags=[f"--otlp-endpoint={collector.url}"])
    for router in ROUTERS:
        cluster.start_router(router)
    try:
        cluster.start_worker("first", "both")
        cluster.wait_for("first", "is ready")  # its programs are in the cache then
        cluster.start_worker("second", "decode", kv_compression="on")
        cluster.wait_until_ready()
        wait_for_workers(cluster, 2)
        cluster.wait_until_ready(ROUTERS[1])
        yield cluster
    finally:
        cluster.close()


def wait_for_workers(cluster: Cluster, number: int, router: str = "router") -> None:
    deadline = time.monotonic() + 60.0
    while cluster.num_workers(router) != number:
        assert time.monotonic() < deadline, cluster.log(router)
        time.sleep(0.05)


def ask_all(cluster: Cluster, router: str = "router") -> list[Stream]:
    return [
        Stream(cluster.url_of(router), prompt=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **kind)
        for prompt, kind in zip(PROMPTS, KINDS, strict=True)
    ]


def check(streams: list[Stream], expected: list[list[int]]) -> None:
    for stream, tokens in zip(streams, expected, strict=True):
        stream.join(120.0)
        assert (stream.error, stream.finish_reason) == (None, "length")
        assert stream.tokens == tokens


def check_all_free(cluster: Cluster, *names: str) -> None:
    """Every page of every pool, and every page on a host, within the lease."""
    deadline = time.monotonic() + LEASE_SECONDS + 5.0
    while held := [load for load in cluster.loads(*names) if load.num_used_pages or load.num_kept_handoffs or load.num_incoming]:
        assert time.monotonic() < deadline, held
        time.sleep(0.1)


def test_tokens_are_one_engines(cluster: Cluster, expected: list[list[int]]) -> None:
    """What the second worker decodes, and is not short, the first prefills."""
    check(ask_all(cluster), expected)
    check_all_free(cluster, "first", "second")
    load = cluster.loads("second")[0]
    assert load.num_pages_received > 0
    assert 0 < load.num_wire_bytes_pulled < 0.95 * load.num_bytes_pulled, "it asks for coded pages"


def test_one_trace_goes_through_both_workers_and_the_transfer(cluster: Cluster, collector: TraceCollector) -> None:
    trace_id, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    prompt = np.random.default_rng(9).integers(0, 500, 120).tolist()
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
    sent = httpx.post(f"{cluster.url}/v1/completions", json=asked, headers={"traceparent": f"00-{trace_id}-{client}-01"}, timeout=60.0)
    assert sent.status_code == 200, sent.text
    steps = {step.name: step for step in collector.trace(trace_id, 5)}
    assert len(steps) == 5
    http, router, decode, transfer, prefill = (steps[name] for name in ("POST /v1/completions", "router", "decode", "transfer", "prefill"))
    assert [step.parent_id for step in (http, router, decode, transfer, prefill)] == [
        client,
        *(step.span_id for step in (http, router, decode, transfer)),
    ]
    assert (http.service, decode.service, prefill.service) == ("jaxinfer router", "jaxinfer decode worker", "jaxinfer both worker")
    assert http.attributes["status"] == 200 and router.attributes["reason"] == "prefilled apart"
    assert transfer.attributes["pages"] == 8 and prefill.attributes["prefill_seconds"] > 0 < decode.attributes["decode_seconds"]


def test_clients_that_leave_at_any_moment_leave_no_page(cluster: Cluster) -> None:

    def leave(seed: int) -> None:
        random = np.random.default_rng(seed)
        prompt = random.integers(0, 500, int(random.integers(1, 250))).tolist()
        with suppress(httpx.ReadTimeout):
            httpx.post(
                f"{cluster.url}/v1/completions",
                json={"model": "tiny", "prompt": prompt, "max_tokens": 200, "ignore_eos": True},
                timeout=httpx.Timeout(60.0, read=random.uniform(0.001, 0.2)),
            )

    with ThreadPoolExecutor(8) as clients:
        assert len(list(clients.map(leave, range(200)))) == 200
    check_all_free(cluster, "first", "second")


def test_a_worker_that_is_stopped_in_mid_stream(cluster: Cluster, expected: list[list[int]]) -> None:
    streams = ask_all(cluster)
    for stream in streams:
        stream.wait_for(20)
    cluster.signal("second", signal.SIGSTOP)
    check(streams, expected)
    cluster.signal("second", signal.SIGCONT)  # what it says late nobody hears
    wait_for_workers(cluster, 2)
    check(ask_all(cluster), expected)


def test_a_worker_that_is_stopped_while_it_prefills(cluster: Cluster, expected: list[list[int]]) -> None:
    """The one that waits for its pages notices by itself, and goes on alone."""
    began, streams = time.monotonic(), ask_all(cluster)
    time.sleep(0.03)
    cluster.signal("first", signal.SIGSTOP)
    check(streams, expected)
    cluster.signal("first", signal.SIGCONT)
    assert time.monotonic() - began < 20.0
    wait_for_workers(cluster, 2)
    check_all_free(cluster, "first", "second")


def test_a_rolling_restart_and_a_router_that_is_killed(cluster: Cluster, expected: list[list[int]]) -> None:
    """Under load all the time. Who asked the router that ends has to ask another; nobody else notices. The second takes
    pages as JAX's arrays from now on."""
    for name, role, transport in (("first", "both", "auto"), ("second", "decode", "jax")):
        streams = ask_all(cluster)
        streams[-1].wait_for(10)
        cluster.signal(name, signal.SIGTERM)
        check(streams, expected)
        cluster.processes[name].wait(60)
        cluster.start_worker(name, role, kv_transport=transport)
        cluster.wait_for(name, "is ready")
        for router in ROUTERS:
            wait_for_workers(cluster, 2, router)
    lost, kept = ask_all(cluster), ask_all(cluster, ROUTERS[1])
    kept[-1].wait_for(10)
    cluster.signal("router", signal.SIGKILL)
    check(kept, expected)
    for stream in lost:
        stream.join(60.0)
    check_all_free(cluster, "first", "second")
    cluster.start_router()
    wait_for_workers(cluster, 2)
    check(ask_all(cluster), expected)
    assert cluster.loads("second")[0].num_pages_received > 0
    assert "over the socket" not in cluster.log("second"), "arrays did not come"


def test_a_worker_that_is_killed_while_it_prefills_and_decodes(cluster: Cluster, expected: list[list[int]]) -> None:
    streams = ask_all(cluster)
    for stream in streams[:3]:
        stream.wait_for(20)
    cluster.signal("first", signal.SIGKILL)
    check(streams, expected)
    check(ask_all(cluster), expected)  # by the one that is left
    check_all_free(cluster, "second")
