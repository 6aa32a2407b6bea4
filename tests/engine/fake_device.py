"""The engine's host half over a make-believe device: pages hold token ids, and the next token is a checksum of all
tokens that the page table leads to. A page given to two owners, lost, moved wrongly or written late changes the
tokens.

A group of layers with a bounded span keeps of each token a checksum of it and of what the span before it holds, so
that whatever was wrong when any token was computed shows in the end.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from jaxinfer.config import EngineConfig, parse_bytes, parse_disk
from jaxinfer.decode.batch import ON_DEVICE, DecodeBatch
from jaxinfer.engine import Engine
from jaxinfer.engine.builder import micro_batch_buckets
from jaxinfer.engine.components import EngineComponents, Runners, TierSettings, build_roles
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_tiers.tiers import Tiers
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS
from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.planner.kv_memory import max_context_tokens
from jaxinfer.prefill.batch import PrefillBatch
from jaxinfer.prefill.chunk_size import ChunkSizeController
from jaxinfer.prefill.runner import PrefillResult
from jaxinfer.request import SamplingParams
from jaxinfer.sampling.params import SamplingRows
from jaxinfer.sampling.sampler import Sampled
from jaxinfer.sequence import Sequence as EngineSequence
from jaxinfer.stats import EngineStats
from pallas_kernels.span import FULL_ATTENTION, Span
from tests.kv_transfer.fake_mover import FakeMover
from tests.server.fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.vocab_size


def checksum(values: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(values, np.uint64).tobytes())


def kept(token: int, before: Sequence[int], span: Span) -> int:
    """What a group of layers keeps of a token, from what it kept of those that the token attends to."""
    return token if span == FULL_ATTENTION else checksum([token, *before])


def next_token(context: Sequence[int], seed: int, choice: Sequence[int] = range(VOCAB)) -> int:
    """What the make-believe model says after all that its last token attends to, of each group, if it may say these."""
    return choice[checksum([seed, *context]) % len(choice)]


def _choice(rows: SamplingRows, row: int, newest: int) -> Sequence[int]:
    """What a restricted row may sample after a token."""
    if not rows.is_restricted[row]:
        return range(VOCAB)
    entries = zip(rows.bias_tokens[row].tolist(), rows.bias_values[row].tolist(), rows.bias_until[row].tolist(), strict=True)
    known = [entry for entry in entries if entry[0] < VOCAB]
    banned = {token for token, value, until in known if value < -1e20 and (until >= 0 or newest == -1 - until)}
    return [token for token, value, _ in known if value == 0 and token not in banned]


def allowed_next(params: SamplingParams, generated: Sequence[int]) -> Sequence[int]:
    """What may come after these, worked out without an engine."""
    if params.allowed_token_ids is None:
        return range(VOCAB)
    words = [TOKENIZER.encode(word) for word in params.bad_words]
    return [t for t in params.allowed_token_ids if not any([*generated, t][-len(word) :] == word for word in words)]


def expected_tokens(
    prompt: Sequence[int], params: SamplingParams, index: int, max_model_len: int, spans: Sequence[Span] = (FULL_ATTENTION,)
) -> list[int]:
    """The tokens of a request's sequence, worked out without an engine."""
    assert params.seed is not None
    tokens = list(prompt)
    room = max_model_len - len(prompt)
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    of_groups: list[list[int]] = [[] for _ in spans]
    while len(tokens) - len(prompt) < most:
        context: list[int] = []
        for span, values in zip(spans, of_groups, strict=True):
            for position in range(len(values), len(tokens)):
                values.append(kept(tokens[position], values[span.first(position) :], span))
            context += values[span.first(len(tokens) - 1) :]
        tokens.append(next_token(context, params.seed + index, allowed_next(params, tokens[len(prompt) :])))
        if tokens[-1] in params.stop_token_ids or (tokens[-1] in TOKENIZER.eos_token_ids and not params.ignore_eos):
            break
    return tokens[len(prompt) :]


class LateArray:
    """An array that the device takes a while to fill."""

    def __init__(self, values: np.ndarray, num_polls: int) -> None:
        self._values = values
        self._num_polls = num_polls

    def is_ready(self) -> bool:
        self._num_polls -= 1
        return self._num_polls < 0

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self._values


class Device(Protocol):
    """Decides when the results of steps are there."""

    def run(self, values: np.ndarray, num_tokens: int) -> Any:
        """A step that computes so many tokens, each device's in order; returns the array of what they gave."""


class UnsteadyDevice:
    """Results come early and late at random."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def run(self, values: np.ndarray, num_tokens: int) -> LateArray:
        return LateArray(values, int(self._random.choice([0, 1, 3, 20])))


class FakeRunner:
    """What the two runners have in common."""

    def __init__(self, pool: np.ndarray, config: EngineConfig, max_model_len: int, device: Device, spans: Sequence[Span]) -> None:
        self.pool = pool
        self.spans = spans
        self.num_groups = len(spans)
        self.table_width = -(-max_model_len // pool.shape[1]) * self.num_groups
        self.num_stages = config.devices.layout("prefill").pp
        self.num_micro_batches = config.devices.layout("decode").pp
        self.buckets = micro_batch_buckets(config.schedule, self.num_micro_batches)
        self.num_slots = self.buckets[-1]
        self._device = device
        self._last = np.zeros(self.num_micro_batches * self.num_slots, np.int64)
        self._counted: dict[int, list[int]] = {}
        self._page_table = np.zeros((self.num_micro_batches * self.num_slots, self.table_width), np.int64)

    def count_tokens(self, row: int, token_ids: Sequence[int], num_prompt: int) -> None:
        assert 0 < num_prompt <= len(token_ids)
        self._counted[row] = list(token_ids)

    def write(self, table: np.ndarray, start: int, tokens: Sequence[int]) -> list[int]:
        """Write tokens from position `start` on; returns what the last one attends to, of each group."""
        context: list[int] = []
        for group, span in enumerate(self.spans):
            for position, token in enumerate(tokens, start):
                page, offset = self._at(table, group, position)
                assert page, "a token goes to no page"
                self.pool[page, offset] = kept(token, self._read(table, group, range(span.first(position), position)), span)
            context += self._read(table, group, range(span.first(start + len(tokens) - 1), start + len(tokens)))
        return context

    def next(self, context: Sequence[int], rows: SamplingRows, row: int, counted_at: int) -> int:
        """Choose the next token from the whole context."""
        if rows.repetition_penalty[row] != 1.0 and tuple(self.spans) == (FULL_ATTENTION,):
            assert sorted(self._counted[counted_at]) == sorted(context)
        return next_token(context, int(rows.seed[row, 0]) << 32 | int(rows.seed[row, 1]), _choice(rows, row, context[-1]))

    def _at(self, table: np.ndarray, group: int, position: int) -> tuple[int, int]:
        run, offset = divmod(position, self.pool.shape[1])
        return int(table[run * self.num_groups + group]), offset

    def _read(self, table: np.ndarray, group: int, positions: range) -> list[int]:
        runs, offsets = np.divmod(np.arange(positions.start, positions.stop), self.pool.shape[1])
        found: list[int] = self.pool[table[runs * self.num_groups + group], offsets].tolist()
        return found

    def result(self, tokens: np.ndarray, num_tokens: int) -> Sampled:
        packed = np.stack([tokens, np.zeros_like(tokens)], axis=1)  # no log-probabilities
        return Sampled(self._device.run(packed, num_tokens))


class FakePrefill(FakeRunner):
    num_rows = 8
    num_tokens = 0  # computed so far

    def __init__(self, pool: np.ndarray, config: EngineConfig, *others: Any) -> None:
        super().__init__(pool, config, *others)
        self.buckets = config.schedule.prefill_buckets

    def run(self, batch: PrefillBatch) -> PrefillResult:
        packed = batch.packed
        tokens = np.zeros(len(packed.query_len), np.int64)
        contexts: list[list[int]] = [[] for _ in packed.query_len]
        for row, length in enumerate(packed.query_len):
            if length:
                at, end = packed.query_start[row], packed.kv_len[row]
                new = packed.token_ids[at : at + length].tolist()
                contexts[row] = self.write(packed.page_table[row], int(end - length), new)
                tokens[row] = self.next(contexts[row], batch.sampling, row, row)
        num_tokens = int(packed.query_len.sum())
        self.num_tokens += num_tokens
        return PrefillResult(self.result(tokens, num_tokens), None, contexts)

    def repeat(self, last_hidden: list[list[int]], row: int) -> list[int]:
        return last_hidden[row]

    def sample(self, last_hidden: list[int], rows: SamplingRows, grammars: Sequence[Any] = ()) -> Sampled:
        assert len(rows.packed) == self.num_rows
        is_in_use = [any(row) for row in rows.seed]
        tokens = [self.next(last_hidden, rows, row, row) if is_in_use[row] else 0 for row in range(self.num_rows)]
        return self.result(np.asarray(tokens), 0)

    def copy_pages(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        assert len(source_ids) == len(target_ids) == self.num_groups
        assert not set(source_ids) & set(target_ids)
        self.pool[list(target_ids)] = self.pool[list(source_ids)]


class FakeDecode(FakeRunner):
    def assign_slot(self, slot: int, page_ids: Sequence[int]) -> None:
        self._page_table[slot] = 0
        self._page_table[slot, : len(page_ids)] = page_ids

    def put(self, rows: SamplingRows, num_generated: np.ndarray, *, has_masks: bool = False) -> SamplingRows:
        return rows

    def run(self, batch: DecodeBatch, rows: SamplingRows, micro_batch: int) -> Sampled:
        tokens = np.zeros(len(batch.slots), np.int64)
        for row, local_slot in enumerate(batch.slots):
            if local_slot < self.num_slots:
                slot = micro_batch * self.num_slots + local_slot
                fed = int(self._last[slot]) if batch.tokens[row] == ON_DEVICE else int(batch.tokens[row])
                position = int(batch.positions[row])
                at = position // self.pool.shape[1] * self.num_groups
                self._page_table[slot, at : at + self.num_groups] = batch.pages[row]
                tokens[row] = self.next(self.write(self._page_table[slot], position, [fed]), rows, row, int(slot))
                self._last[slot] = tokens[row]
                self._counted.setdefault(int(slot), []).append(int(tokens[row]))
        return self.result(tokens, int(np.count_nonzero(batch.slots < self.num_slots)))


class StrictDeviceClock(DeviceClock):
    """Insists on being told of steps in the order of their launches."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._last_launch = 0.0

    def ended(self, launched_at: float) -> float:
        assert launched_at >= self._last_launch
        self._last_launch = launched_at
        return super().ended(launched_at)


class FakeTransport:
    """From one pool of token ids to another. The target's pages have what the source's had when the move was begun."""

    def __init__(self, source: np.ndarray, target: np.ndarray) -> None:
        self._source, self._target = source, target

    def move(self, source_ids: Sequence[int], target_ids: Sequence[int], groups: Sequence[int]) -> None:
        assert 0 < len(source_ids) == len(target_ids) == len(groups) <= MOVE_BUCKETS[-1]
        self._target[list(target_ids)] = self._source[list(source_ids)]


def fake_tiers(config: EngineConfig, page_bytes: int) -> TierSettings | None:
    """The real tiers for pages of token ids. Whatever is there is fetched."""
    host_size = parse_bytes("kv_host_memory", config.cache.kv_host_memory or "0")
    if not host_size:
        return None
    disk = parse_disk("kv_disk", config.cache.kv_disk) if config.cache.kv_disk else None
    tiers = Tiers(page_bytes, host_size, disk, b"make-believe")
    return TierSettings(tiers, lambda num_tokens: math.inf, most_fetched=host_size // page_bytes)


def fake_engine(
    config: EngineConfig,
    num_pages: int,
    *,
    seed: int = 0,
    devices: Sequence[Device] = (),
    clock: Callable[[], float] = time.monotonic,
    spans: Sequence[Span] = (FULL_ATTENTION,),
) -> Engine:
    """An engine over pools of `num_pages` pages, that can hold one whole context at least. `devices` are those of the
    meshes, prefill's first; if not given, `seed` decides what comes late. `spans` are those of the model's groups of
    layers."""
    random = np.random.default_rng(seed)
    size = config.cache.page_size or 16
    spec, chunk_size = PageSpec(1, 1, 1, size, 8, tuple(spans)), config.schedule.prefill_buckets[-1]
    most = max_context_tokens(spec, num_pages, chunk_size, config.model.max_model_len or num_pages * size)
    max_model_len = min(config.model.max_model_len or most, most)
    shares_mesh = config.devices.prefill_devices == config.devices.decode_devices

    def build(config: EngineConfig, stats: EngineStats) -> EngineComponents:
        pools = [np.full((num_pages + 1, size), -1, np.int64) for _ in range(1 if shares_mesh else 2)]
        of_meshes = devices or [UnsteadyDevice(random)]
        runners = Runners(
            FakePrefill(pools[0], config, max_model_len, of_meshes[0], spans),  # type: ignore[arg-type]
            FakeDecode(pools[-1], config, max_model_len, of_meshes[-1], spans),  # type: ignore[arg-type]
            [StrictDeviceClock(clock) for _ in pools],
            [FakeMover(pool) for pool in pools],  # type: ignore[misc]
            None if shares_mesh else FakeTransport(pools[0], pools[1]),
            None if shares_mesh else FakeTransport(pools[1], pools[0]),
        )
        schedule, tiers = config.schedule, fake_tiers(config, pools[0][0].nbytes)
        chunk_controller = ChunkSizeController(
            schedule.prefill_buckets, schedule.target_ttft, schedule.target_itl, delays_decode=shares_mesh
        )
        stats.read_tiers = tiers and tiers.tiers.stats
        prefill, decode = build_roles(config, spec, [num_pages + 1] * len(pools), runners, chunk_controller, tiers, clock)
        template = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB))
        plan = SimpleNamespace(max_model_len=max_model_len, shares_mesh=shares_mesh, template=template)
        return EngineComponents(config, plan, TOKENIZER, prefill, decode, SimpleNamespace(decode=()), clock=clock)  # type: ignore[arg-type]

    return Engine(config, build=build)


def sequences_of(engine: Engine) -> list[EngineSequence]:
    """Every unfinished sequence."""
    return [sequence for of_request in engine._requests.values() for sequence in of_request]
