"""EncodeWorker: turns, aborts and the books, on a device that ends its work when it is told to."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.encode.batch import most_texts
from jaxinfer.encode.queue import EncodeQueue
from jaxinfer.encode.text_batching import TextReader
from jaxinfer.encode.worker import EncodeWorker
from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.stats import EngineStats
from tests.server.fakes import byte_tokenizer

SECONDS = 2.0  # of a batch on the device


class Result:
    """A text's embedding is the sum of its tokens; it takes its time to come."""

    def __init__(self, device, batch):
        self.device = device
        count = most_texts(*batch.token_ids.shape)
        self.values = np.array([[batch.token_ids[batch.texts == text].sum()] for text in range(count)], np.float32)
        device.free_at = self.ends_at = max(device.now, device.free_at) + SECONDS

    def is_ready(self):
        return self.device.now >= self.ends_at

    def __array__(self, *_, **__):
        self.device.now = max(self.device.now, self.ends_at)
        return self.values


class Device:
    """A runner, and the clock that it goes by."""

    def __init__(self):
        self.now = self.free_at = 0.0
        self.batches = []

    def run(self, batch):
        self.batches.append(batch)
        return Result(self, batch)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def worker(device):
    tokenizer = byte_tokenizer()
    reader = TextReader(tokenizer, tokenizer.vocab_size, 256, 1)
    return EncodeWorker(reader, EncodeQueue(256), device, "mean", DeviceClock(lambda: device.now), EngineStats())


def add(worker, request_id, *texts):
    worker.add(request_id, [np.array(text, np.int32) for text in texts])


def run(worker):
    done = []
    while worker.has_work:
        done += worker.step()
    return {each.request_id: each for each in done}


def test_each_request_gets_its_own_embeddings_in_its_order(worker):
    add(worker, "a", [1, 2, 3], [4] * 200, [5])
    add(worker, "b", [6] * 100, [7, 7])
    done = run(worker)
    assert done["a"].embeddings.tolist() == [[6], [800], [5]]
    assert done["b"].embeddings.tolist() == [[600], [14]]
    assert not worker.has_work


def test_two_batches_are_under_way_when_alone_and_one_beside_others(worker, device):
    add(worker, "a", *[[1] * 256] * 10)
    assert worker.step() == []
    assert len(device.batches) == 2
    worker.step()
    assert (len(device.batches), device.now) == (3, SECONDS)
    worker.step(most_in_flight=1)
    worker.step(most_in_flight=1)
    assert len(device.batches) == 4
    assert device.now == 3 * SECONDS


def test_without_waiting_a_batch_is_read_once_it_has_ended(worker, device):
    add(worker, "a", [1])
    for _ in range(3):
        assert worker.step(wait=False, most_in_flight=1) == []
    assert (device.now, len(device.batches)) == (0.0, 1)
    device.now = SECONDS
    assert [done.request_id for done in worker.step(wait=False, most_in_flight=1)] == ["a"]


def test_an_aborted_request_is_not_heard_of_again(worker, device):
    add(worker, "a", *[[1] * 256] * 9)
    add(worker, "b", [2])
    worker.step()
    assert worker.abort("a")
    assert not worker.abort("a")
    assert set(run(worker)) == {"b"}
    assert len(device.batches) <= 3
    add(worker, "a", [3], [4])  # its name may be used again, while what was under way of it ends too
    worker.step()
    worker.abort("a")
    add(worker, "a", [5])
    assert run(worker)["a"].embeddings.tolist() == [[5]]


def test_waiting_and_device_time_are_told_and_add_up(worker, device):
    add(worker, "a", *[[1] * 256] * 4)
    add(worker, "b", [1] * 128)
    device.now = 10.0
    done = run(worker)
    assert done["a"].usage.queue_seconds == 10.0
    assert sum(each.usage.prefill_seconds for each in done.values()) == pytest.approx(SECONDS * len(device.batches))
    assert done["a"].usage.prefill_seconds > done["b"].usage.prefill_seconds > 0
    assert all(each.usage.decode_seconds == 0 for each in done.values())


def test_a_batchs_time_is_shared_out_by_tokens(worker):
    add(worker, "a", [1] * 20)
    add(worker, "b", [1] * 10)
    done = run(worker)
    assert done["a"].usage.prefill_seconds == pytest.approx(2 * done["b"].usage.prefill_seconds)
