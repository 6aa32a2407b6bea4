"""No page is lost: random sequences of add, abort, preempt and finish, on the host half alone."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_tiers.disk_file import ALIGNMENT, ENTRY_SIZE
from jaxinfer.request import FinishReason, OutputDelta, RequestContext, RequestError, SamplingParams
from pallas_kernels.span import FULL_ATTENTION, Span
from tests.engine.fake_device import TOKENIZER, VOCAB, LateArray, expected_tokens, fake_engine
from tests.engine.page_audit import assert_all_free, audit
from tests.engine.simulated import Clock
from tests.kv_tiers.made_pages import disk_size

STEPS = 600  # of each of the runs below
AUDITED = 4  # every so many steps, and after every abort: what is lost stays lost
NUM_DISK_PAGES = 30


@dataclass
class Followed:
    """What came of one request."""

    prompt: list[int]
    params: SamplingParams
    is_aborted: bool = False
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)


def take_step(engine: Engine, followed: dict[str, Followed], clock: Clock | None) -> None:
    if clock is not None:
        clock.now += 0.0005
    for delta in engine.step():
        request = followed[delta.request_id]
        assert not request.is_aborted, "a delta of an aborted request"
        assert delta.index not in request.reasons, "a delta after the last one"
        request.tokens[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            request.reasons[delta.index] = delta.finish_reason
    if (engine.stats.num_prefill_steps + engine.stats.num_decode_steps) % AUDITED == 0:
        audit(engine)


def random_params(random: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        seed=int(random.integers(0, 2**62)),
        max_tokens=int(random.choice([0, 1, 2, 9, 30, 60])),
        n=int(random.choice([1, 1, 1, 2, 5])),
        ignore_eos=bool(random.integers(2)),
        stop_token_ids=tuple(random.integers(0, VOCAB, int(random.choice([0, 3]))).tolist()),
        repetition_penalty=float(random.choice([1.0, 1.5])),
    )


def random_context(random: np.random.Generator, now: float) -> RequestContext:
    return RequestContext(
        tenant=str(random.choice(["", "a", "b"])),
        namespace=str(random.choice(["", "", "a"])),
        session=str(random.integers(3)) if random.random() < 0.3 else None,
        priority=int(random.choice([0, 0, 0, 10, 20])),
        deadline=now + float(random.choice([0.0, 0.05])) if random.random() < 0.05 else None,
    )


def random_prompt(random: np.random.Generator, followed: dict[str, Followed], most: int) -> list[int]:
    """New from the first token on, or as one before it for a while, its answer included."""
    prompt = random.integers(0, VOCAB, int(random.integers(1, most))).tolist()
    if followed and random.random() < 0.6:
        known = followed[f"r{random.integers(len(followed))}"]
        start = (known.prompt + known.tokens[0])[: int(random.integers(1, most))]
        prompt = (start + prompt[len(start) :])[: most - 1]
    return prompt


def run(engine: Engine, random: np.random.Generator, clock: Clock | None = None) -> dict[str, Followed]:
    """Requests come in bursts, some go away, and at last all that is left is served. Time is real if no clock is given."""
    followed: dict[str, Followed] = {}
    for _ in range(STEPS):
        if random.random() < 0.12:
            for _ in range(int(random.integers(1, 4))):
                prompt = random_prompt(random, followed, engine.max_model_len - 8)
                request_id, params = f"r{len(followed)}", random_params(random)
                try:
                    engine.add_request(request_id, prompt, params, random_context(random, (clock or time.monotonic)()))
                except RequestError as error:
                    assert error.code == "context_length_exceeded"
                    continue
                followed[request_id] = Followed(prompt, params)
        if random.random() < 0.04 and (
            open_requests := [i for i, r in followed.items() if len(r.reasons) < r.params.n and not r.is_aborted]
        ):
            request_id = str(random.choice(open_requests))
            assert engine.abort(request_id)
            followed[request_id].is_aborted = True
            audit(engine)
        take_step(engine, followed, clock)
    for _ in range(20_000):
        if not engine.has_work:
            return followed
        take_step(engine, followed, clock)
    raise AssertionError("the engine never came to an end")


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("meshes", "num_pages", "page_size", "max_batch_size", "chunk_size"),
    [
        ("shared", 12, 8, 8, 64),
        ("shared", 30, 4, 16, 48),
        ("shared", 100, 1, 4, 32),
        ("shared", 400, 16, 32, 512),
        ("two", 12, 8, 8, 64),
        ("two", 30, 4, 16, 48),
        ("two", 40, 4, 3, 100),
        ("two", 400, 16, 32, 512),
    ],
)
def test_every_request_ends_once_with_its_tokens_and_no_page_is_lost(
    clock, meshes, num_pages, page_size, max_batch_size, chunk_size, seed, prefix_cache
):
    config = EngineConfig.of(
        max_model_len=min(120, num_pages * page_size),
        decode_devices=(0,) if meshes == "shared" else (1,),
        page_size=page_size,
        prefix_cache=prefix_cache,
        ageing_seconds=0.05,
        max_batch_size=max_batch_size,
        decode_buckets=(1, 4, 8),
        prefill_buckets=(32, 64),
        prefill_chunk_size=chunk_size,
    )
    engine = fake_engine(config, num_pages, seed=seed, clock=clock)
    check(engine, run(engine, np.random.default_rng(seed), clock))
    if num_pages <= 30:
        assert engine.stats.num_preemptions > 5
    assert (engine.stats.num_cached_tokens > 0) == prefix_cache
    if meshes == "two":
        assert engine.stats.num_pages_moved > 100


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "layouts",
    [
        {"prefill_parallel": "pp=3"},
        {"prefill_parallel": "pp=2", "decode_parallel": "pp=4"},
        {"decode_parallel": "pp=2", "prefill_parallel": "tp=2"},
    ],
)
@pytest.mark.parametrize(("num_pages", "max_batch_size"), [(12, 8), (40, 5), (200, 16)])
def test_a_pipeline_has_a_step_of_each_micro_batch_under_way(clock, layouts, num_pages, max_batch_size, seed):
    config = EngineConfig.of(
        max_model_len=min(120, num_pages * 8),
        page_size=8,
        ageing_seconds=0.05,
        max_batch_size=max_batch_size,
        decode_buckets=(1, 4, 8),
        prefill_buckets=(32, 64),
        prefill_chunk_size=64,
        **layouts,
    )
    engine = fake_engine(config, num_pages, seed=seed, clock=clock)
    decode, most = engine._components.decode.worker, 0

    def watched(*arguments):
        nonlocal most
        launched = launch(*arguments)
        micro_batches = [step.rows.micro_batch for step in decode._in_flight]
        most = max(most, len(set(micro_batches)))
        assert len(micro_batches) <= config.devices.layout("decode").pp + 1
        return launched

    launch, decode.launch = decode.launch, watched
    check(engine, run(engine, np.random.default_rng(seed), clock))
    assert most == config.devices.layout("decode").pp
    if num_pages == 12:
        assert engine.stats.num_preemptions > 10


class SlowDevice:
    """Nothing is there before it is waited for."""

    def run(self, values: np.ndarray, num_tokens: int) -> LateArray:
        return LateArray(values, 1_000_000)


@pytest.mark.parametrize("layout", ["pp=1", "pp=3"])
def test_prefill_keeps_all_stages_busy_though_nothing_decodes(clock, layout):
    config = EngineConfig.of(
        max_model_len=64,
        page_size=8,
        max_batch_size=16,
        decode_buckets=(16,),
        prefill_buckets=(64,),
        prefill_chunk_size=64,
        prefill_parallel=layout,
    )
    engine = fake_engine(config, 200, clock=clock, devices=[SlowDevice()])
    num_prompts, wanted = 12, config.devices.layout("prefill").pp + 1
    for number in range(num_prompts):
        engine.add_request(str(number), [number] * 60, SamplingParams(max_tokens=1, seed=0))
    under_way = []
    while engine.has_work:
        engine.step()
        under_way.append(engine._components.prefill.num_in_flight)
    filling, draining = list(range(1, wanted)), list(range(wanted - 1, -1, -1))
    assert under_way[: len(filling)] == filling
    assert under_way[-len(draining) :] == draining
    assert set(under_way[len(filling) : -len(draining)]) == {wanted - 1, wanted}


MIXES = {
    "windows": (FULL_ATTENTION, Span(window=9)),
    "chunks": (FULL_ATTENTION, Span(chunk=12), Span(chunk=12)),
    "windows alone": (Span(window=20),),
    "chunks alone": (Span(chunk=16),),
    "a window of one": (FULL_ATTENTION, Span(window=1)),
    "two kinds": (FULL_ATTENTION, FULL_ATTENTION, Span(window=30), Span(chunk=7)),
}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize("spans", MIXES)
def test_layers_of_bounded_spans_keep_what_they_attend_to_and_no_more(clock, meshes, spans, prefix_cache):
    config = EngineConfig.of(
        max_model_len=120,
        decode_devices=(0,) if meshes == "shared" else (1,),
        page_size=4,
        prefix_cache=prefix_cache,
        ageing_seconds=0.05,
        max_batch_size=8,
        decode_buckets=(1, 4, 8),
        prefill_buckets=(32,),
        prefill_chunk_size=32,
    )
    of_groups = MIXES[spans]
    num_pages = PageSpec(1, 1, 1, 4, 8, of_groups).max_pages(120, 32)  # one context, or several short ones
    engine = fake_engine(config, num_pages, clock=clock, spans=of_groups)
    check(engine, run(engine, np.random.default_rng(8), clock), of_groups)
    assert engine.max_model_len == 120
    if FULL_ATTENTION in of_groups:
        assert engine.stats.num_preemptions > 0
    assert (engine.stats.num_cached_tokens > 20) == prefix_cache
    if meshes == "two":
        assert engine.stats.num_pages_moved > 100


def check(engine: Engine, followed: dict[str, Followed], spans: tuple[Span, ...] = (FULL_ATTENTION,)) -> None:
    assert_all_free(engine)
    assert len(followed) > 50
    num_finished = 0
    for request in followed.values():
        for index in range(request.params.n):
            expected = expected_tokens(request.prompt, request.params, index, engine.max_model_len, spans)
            if request.is_aborted or request.reasons[index] is FinishReason.TIMEOUT:
                assert request.tokens[index] == expected[: len(request.tokens[index])]
                continue
            num_finished += 1
            assert request.tokens[index] == expected
            ended = expected and expected[-1] in {
                *request.params.stop_token_ids,
                *(() if request.params.ignore_eos else TOKENIZER.eos_token_ids),
            }
            assert request.reasons[index] is (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert engine.stats.finished[FinishReason.STOP] + engine.stats.finished[FinishReason.LENGTH] >= num_finished


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize("disk", ["no disk", "a disk", "a disk that loses bits"])
def test_pages_that_come_back_from_the_tiers_change_nothing(meshes, disk, seed, tmp_path):
    config = EngineConfig.of(
        max_model_len=96,
        decode_devices=(0,) if meshes == "shared" else (1,),
        page_size=8,
        max_batch_size=8,
        decode_buckets=(8,),
        prefill_buckets=(32, 64),
        prefill_chunk_size=64,
        kv_host_memory=str(24 * 8 * 8),
        kv_disk=None if disk == "no disk" else f"{tmp_path / 'kv'}:{disk_size(NUM_DISK_PAGES)}",
    )
    refused = 0
    for _ in range(1 if disk == "no disk" else 2):  # the second finds what the first left in the file
        engine = fake_engine(config, 14, seed=seed)
        if disk == "a disk that loses bits":
            lose_bits(engine, tmp_path / "kv", np.random.default_rng(seed))
        check(engine, run(engine, np.random.default_rng(seed)))
        engine.close()
        assert engine.stats.num_restored_tokens > 0
        assert engine.stats.read_tiers is not None
        refused += sum(engine.stats.read_tiers().refused.values())
    assert (refused > 0) == (disk == "a disk that loses bits")


def lose_bits(engine: Engine, file: Path, random: np.random.Generator) -> None:
    """Before each step change a bit of a page in the file, or of its entry in the table."""
    step = engine.step

    def damage_and_step() -> list[OutputDelta]:
        slot, offset = int(random.integers(NUM_DISK_PAGES)), int(random.integers(64))
        position = random.choice([ALIGNMENT + slot * ENTRY_SIZE, (2 + slot) * ALIGNMENT]) + offset
        with file.open("r+b") as opened:
            opened.seek(position)
            byte = opened.read(1)
            opened.seek(position)
            opened.write(bytes([value ^ 1 << int(random.integers(8)) for value in byte]))
        return step()

    engine.step = damage_and_step  # type: ignore[method-assign]
