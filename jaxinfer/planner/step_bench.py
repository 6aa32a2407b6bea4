"""Timed steps of a layout's programs on this machine, with random weights: predictions are fitted to these times and
compared with them."""

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
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.pipeline.stage import Stage
from jaxinfer.planner.placement import RolePlacement
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_programs import role_stages
from jaxinfer.prefill.batch import empty_batch as empty_prefill_batch
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.programs.buckets import prefill_rows
from jaxinfer.programs.compilation import compile_programs
from jaxinfer.sampling.params import neutral_rows
from jaxinfer.weights.load import random_weights
from sharding.cost_model import Step

_TURN_SECONDS = 0.05


@dataclass(frozen=True)
class StepBench:
    """A step that can be repeated. With several stages, a round: one step of each micro-batch."""

    step: Step
    run: Callable[[], None]  # returns when all devices are done


def timed(runs: Sequence[Callable[[], Any]], num_rounds: int) -> list[float]:
    """Median seconds of each run over rounds. A round runs each for the same time, interleaved, so that other load on
    the machine affects all alike. A run returns when its devices are done."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(num_rounds):
        for run, seconds in zip(runs, found, strict=True):
            seconds.append(_mean(run))
    return [statistics.median(seconds) for seconds in found]


def _mean(run: Callable[[], Any]) -> float:
    """Mean seconds of as many runs as fit into `_TURN_SECONDS`, at least one."""
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < _TURN_SECONDS:
        run()
        count += 1
    return (time.perf_counter() - began) / count


def decode_bench(shape: RolePlacement, target: Target, batch: int, context: int) -> StepBench:
    """`batch` sequences, split into one micro-batch a stage, whose newest token is the last of `context`."""
    num_micro_batches = shape.layout.pp
    rows, spec = -(-batch // num_micro_batches), shape.spec
    blocks = spec.blocks_for(context)
    stages = _started(role_stages(shape, target, 0, rows, 1 + num_micro_batches * rows * blocks * spec.num_groups))
    runner = DecodeRunner(stages, (rows,), context)
    runner.start(compile_programs(runner.programs()), _weights(stages))
    page_ids = iter(range(1, 1 + num_micro_batches * rows * blocks * spec.num_groups))
    tables = [[next(page_ids) for _ in range(blocks * spec.num_groups)] for _ in range(num_micro_batches * rows)]
    for slot, table in enumerate(tables):
        runner.assign_slot(slot, table)
    batches = [_decode_batch(tables[start : start + rows], spec, context) for start in range(0, len(tables), rows)]

    sampling = runner.put(neutral_rows(rows), batches[0].num_generated)

    def run() -> None:
        jax.block_until_ready([runner.run(step, sampling, micro_batch) for micro_batch, step in enumerate(batches)])

    run()
    return StepBench(Step("decode", rows, 1, context), run)


def prefill_bench(shape: RolePlacement, target: Target, num_tokens: int) -> StepBench:
    """Prompts of `num_tokens`, one a stage, one after the other."""
    spec = shape.spec
    blocks = spec.blocks_for(num_tokens)
    stages = _started(role_stages(shape, target, 0, num_tokens, 1 + blocks * spec.num_groups))
    runner = PrefillRunner(stages, (num_tokens,), num_tokens)
    runner.start(compile_programs(runner.programs()), _weights(stages))
    batch = empty_prefill_batch(num_tokens, prefill_rows(num_tokens), runner.table_width)
    packed = batch.packed
    packed.page_table[0, : blocks * spec.num_groups] = np.arange(1, 1 + blocks * spec.num_groups)
    packed.query_len[0] = packed.kv_len[0] = num_tokens
    packed.token_ids[:] = np.arange(num_tokens) % shape.architecture.vocab_size

    def run() -> None:
        jax.block_until_ready([runner.run(batch) for _ in stages])

    run()
    return StepBench(Step("prefill", 1, num_tokens, num_tokens), run)


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
