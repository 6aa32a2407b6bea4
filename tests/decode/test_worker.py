"""DecodeWorker: which rows a step has, over a runner that only writes down what it is given."""

from __future__ import annotations

import numpy as np

from jaxinfer.decode.batch import ON_DEVICE, DecodeBatch
from jaxinfer.decode.scheduler import DecodeScheduler
from jaxinfer.decode.worker import DecodeWorker
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.sampling.params import SamplingRows
from jaxinfer.sampling.sampler import Sampled
from jaxinfer.sequence import Sequence, SequenceState
from tests import sequences


class Recorder:
    """Every row samples the token 7."""

    num_micro_batches = 1
    num_slots = 4
    num_groups = 1
    buckets = (4,)

    def __init__(self) -> None:
        self.batches: list[DecodeBatch] = []

    def assign_slot(self, slot: int, page_ids: list[int]) -> None:
        pass

    def put(self, rows: SamplingRows, num_generated: np.ndarray, *, has_masks: bool = False) -> SamplingRows:
        return rows

    def run(self, batch: DecodeBatch, rows: SamplingRows, micro_batch: int) -> Sampled:
        self.batches.append(batch)
        return Sampled(np.full((len(batch.slots), 2), 7, np.int32))


def never() -> None:
    raise AssertionError("there are pages enough")


def join(worker: DecodeWorker, manager: KVManager, sequence: Sequence) -> None:
    sequence.level = 0
    assert manager.grow(sequence.decode.pages, len(sequence.token_ids))
    worker.join(sequence)


def test_a_sequence_that_left_and_came_back_is_not_taken_for_the_one_that_ran() -> None:
    manager, runner = KVManager(PageSpec(1, 1, 1, 4, 4), 33, prefix_cache=False), Recorder()
    worker = DecodeWorker(DecodeScheduler(manager, runner.num_slots), runner, DeviceClock())  # type: ignore[arg-type]
    first, second = sequences.make(5), sequences.make(9)
    join(worker, manager, first)
    join(worker, manager, second)
    assert worker.launch(never)
    worker.leave(first)
    first.state, first.decode.num_in_flight, first.epoch = SequenceState.WAITING, 0, 1
    first.token_ids.append(3)
    join(worker, manager, first)
    assert worker.launch(never)
    batch = runner.batches[1]
    assert batch.tokens[:2].tolist() == [3, ON_DEVICE]
    assert batch.positions[:2].tolist() == [5, 9]
    assert batch.pages[:2, 0].tolist() == [first.decode.pages[-1], second.decode.pages[-1]]


def test_a_batch_that_goes_on_feeds_what_is_on_the_device_and_brings_new_pages_only() -> None:
    manager, runner = KVManager(PageSpec(1, 1, 1, 4, 4), 33), Recorder()
    worker = DecodeWorker(DecodeScheduler(manager, runner.num_slots), runner, DeviceClock())  # type: ignore[arg-type]
    first, second = sequences.make(5), sequences.make(7)
    join(worker, manager, first)
    join(worker, manager, second)
    for _ in range(4):
        assert worker.launch(never)
        if worker.num_in_flight > 1:
            for sequence, token, _ in worker.collect():
                sequence.token_ids.append(token)
    assert [batch.tokens[:2].tolist() for batch in runner.batches] == [[4, 6], *[[ON_DEVICE] * 2] * 3]
    assert [batch.positions[:2].tolist() for batch in runner.batches] == [[4, 6], [5, 7], [6, 8], [7, 9]]
    old, new = second.decode.pages[1:3]
    assert [int(batch.pages[1, 0]) for batch in runner.batches] == [old, old, new, new]
    assert all(batch.packed[2:].tolist() == runner.batches[0].packed[2:].tolist() for batch in runner.batches), "padding stays padding"
