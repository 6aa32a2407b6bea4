"""A layout's programs run on this machine's devices with made-up weights, and timed: what predictions are fitted to and held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.decode.batch import DecodeBatch
from jaxinfer.decode.batch import empty_batch as empty_decode_batch
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.dry_run.programs import role_stages
from jaxinfer.dry_run.shapes import RoleShape
from jaxinfer.dry_run.target import Target
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.prefill.batch import empty_batch as empty_prefill_batch
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.runtime.buckets import prefill_rows
from jaxinfer.runtime.compilation import compile_programs
from jaxinfer.runtime.load import random_weights
from jaxinfer.runtime.stage import Stage
from jaxinfer.sampling.params import neutral_rows
from sharding.cost_model import Step

_TURN_SECONDS = 0.05


@dataclass(frozen=True)
class Bench:
    """A step that can be run again and again. With several stages it is a round: of each micro-batch one."""

    step: Step
    run: Callable[[], None]  # returns when all devices are done


def timed(runs: Sequence[Callable[[], Any]], num_rounds: int) -> list[float]:
    """Seconds of each, which returns when devices are done: medians of rounds in which all take their turn, each for as long, so that what else the
    machine does meets all of them alike."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(num_rounds):
        for run, seconds in zip(runs, found, strict=True):
            seconds.append(_mean(run))
    return [statistics.median(seconds) for seconds in found]


def _mean(run: Callable[[], Any]) -> float:
    """Of as many runs as a turn has room for, one at least."""
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < _TURN_SECONDS:
        run()
        count += 1
    return (time.perf_counter() - began) / count


def decode_bench(shape: RoleShape, spec: PageSpec, target: Target, batch: int, context: int) -> Bench:
    """`batch` sequences whose newest token is the last of `context`; of each of as many micro-batches as there are stages its share."""
    num_lanes = shape.layout.pp
    rows, runs = -(-batch // num_lanes), spec.blocks_for(context)
    stages = _started(role_stages("decode", shape, spec, target, 0, rows, 1 + num_lanes * rows * runs * spec.num_groups))
    runner = DecodeRunner(stages, (rows,), context)
    runner.start(compile_programs(runner.programs()), _weights(stages))
    page_ids = iter(range(1, 1 + num_lanes * rows * runs * spec.num_groups))
    tables = [[next(page_ids) for _ in range(runs * spec.num_groups)] for _ in range(num_lanes * rows)]
    for slot, table in enumerate(tables):
        runner.assign_slot(slot, table)
    batches = [_decode_batch(tables[lane * rows : (lane + 1) * rows], spec, context) for lane in range(num_lanes)]

    sampling = runner.put(neutral_rows(rows), batches[0].num_generated)

    def run() -> None:
        jax.block_until_ready([runner.run(of_lane, sampling, lane) for lane, of_lane in enumerate(batches)])

    run()
    return Bench(Step("decode", rows, 1, context), run)


def prefill_bench(shape: RoleShape, spec: PageSpec, target: Target, num_tokens: int) -> Bench:
    """A prompt of so many tokens, or as many of them as there are stages, one after the other."""
    runs = spec.blocks_for(num_tokens)
    stages = _started(role_stages("prefill", shape, spec, target, 0, num_tokens, 1 + runs * spec.num_groups))
    runner = PrefillRunner(stages, (num_tokens,), num_tokens)
    runner.start(compile_programs(runner.programs()), _weights(stages))
    batch = empty_prefill_batch(num_tokens, prefill_rows(num_tokens), runner.table_width)
    packed = batch.packed
    packed.page_table[0, : runs * spec.num_groups] = np.arange(1, 1 + runs * spec.num_groups)
    packed.query_len[0] = packed.kv_len[0] = num_tokens
    packed.token_ids[:] = np.arange(num_tokens) % shape.architecture.vocab_size

    def run() -> None:
        jax.block_until_ready([runner.run(batch) for _ in stages])

    run()
    return Bench(Step("prefill", 1, num_tokens, num_tokens), run)


def _started(stages: list[Stage]) -> list[Stage]:
    for stage in stages:
        stage.pool.allocate()
    return stages


def _weights(stages: list[Stage]) -> tuple[Any, ...]:
    return tuple(random_weights(stage.template, stage.mesh, stage.rules) for stage in stages)


def _decode_batch(tables: list[list[int]], spec: PageSpec, context: int) -> DecodeBatch:
    batch = empty_decode_batch(len(tables), len(tables), spec.num_groups)
    for row, table in enumerate(tables):
        batch.slots[row], batch.tokens[row], batch.positions[row] = row, row, context - 1
        batch.pages[row] = table[-spec.num_groups :]
    return batch
