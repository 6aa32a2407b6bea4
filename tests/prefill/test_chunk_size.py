"""How many prompt tokens a step takes under targets, and what is made of measured times."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.prefill.chunk_size import ChunkSizeController
from jaxinfer.prefill.queue import WaitingQueue
from jaxinfer.prefill.scheduler import PrefillScheduler
from tests import sequences

BUCKETS = (32, 128, 512)
FIXED, PER_TOKEN, DECODE = 0.01, 0.001, 0.02  # seconds: steps of 42, 138 and 522 ms, and a decode step after each


def step_seconds(bucket: int) -> float:
    return FIXED + bucket * PER_TOKEN


def measured(target_ttft: float | None = None, target_itl: float | None = None, *, delays_decode: bool = True) -> ChunkSizeController:
    """A controller that has seen every bucket and decode steps."""
    chunk_controller = ChunkSizeController(BUCKETS, target_ttft, target_itl, delays_decode=delays_decode)
    for bucket in BUCKETS:
        chunk_controller.observe(bucket, step_seconds(bucket))
    chunk_controller.observe_decode(DECODE)
    return chunk_controller


def waits(*prompts: tuple[int, float]) -> list[tuple[int, float]]:
    return list(prompts)


def test_without_a_target_or_anyone_to_delay_a_step_is_as_large_as_can_be():
    waiting = waits((512, 0.0))
    assert not measured().steers
    assert measured().budget(5, waiting) == 512
    assert measured(target_itl=0.1).budget(0, waiting) == 512
    assert measured(target_ttft=9.0, target_itl=0.1, delays_decode=False).budget(5, waiting) == 512


@pytest.mark.parametrize(("target", "budget"), [(0.55, 512), (0.53, 128), (0.16, 128), (0.15, 32), (0.063, 32), (0.001, 32)])
def test_a_step_and_the_decode_step_after_it_take_no_longer_than_the_target_if_any_does(target, budget):
    assert measured(target_itl=target).budget(1, waits((512, 0.0))) == budget


def test_before_anything_was_measured_no_bucket_is_ruled_out():
    assert ChunkSizeController(BUCKETS, target_itl=0.01).budget(1, waits((512, 0.0))) == 512


def test_a_bucket_that_was_never_measured_is_judged_by_the_nearest_one():
    chunk_controller = ChunkSizeController(BUCKETS, target_itl=0.3)
    chunk_controller.observe(128, 0.128)
    assert chunk_controller.budget(1, waits((512, 0.0))) == 128
    assert chunk_controller.seconds_to_compute(512) == pytest.approx(0.512)
    assert chunk_controller.seconds_to_compute(32) == pytest.approx(0.032)


def test_steps_that_vary_leave_room_for_it():
    """The mean is within the target, and half of the steps are not."""
    chunk_controller = measured(target_itl=0.17)
    assert chunk_controller.budget(1, waits((512, 0.0))) == 128
    for seconds in (0.10, 0.18) * 50:
        chunk_controller.observe(128, seconds)
    assert chunk_controller.budget(1, waits((512, 0.0))) == 32


def test_decode_steps_that_get_slower_count():
    chunk_controller = measured(target_itl=0.17)
    for _ in range(30):
        chunk_controller.observe_decode(0.1)
    assert chunk_controller.budget(1, waits((512, 0.0))) == 32


def test_a_decode_step_that_has_not_ended_tells_nothing():
    chunk_controller = measured(target_itl=0.15)
    for _ in range(50):
        chunk_controller.observe_decode(0.0)
    assert chunk_controller.budget(1, waits((512, 0.0))) == 32


def test_one_slow_step_does_not_rule_a_bucket_out_for_ever():
    chunk_controller = measured(target_itl=0.17)
    chunk_controller.observe(128, 50.0)
    assert chunk_controller.budget(1, waits((512, 0.0))) == 32
    assert simulate(chunk_controller, step_seconds, lambda: DECODE, 40)[-1][0] == 128
    assert chunk_controller.seconds_to_compute(128) == pytest.approx(step_seconds(128), rel=0.1)


def test_a_first_measurement_that_was_off_is_mended_in_use():
    chunk_controller = ChunkSizeController(BUCKETS)
    chunk_controller.observe(32, step_seconds(32))
    chunk_controller.observe(128, 2 * step_seconds(128))
    for _ in range(150):
        for bucket in (32, 128):
            chunk_controller.observe(bucket, step_seconds(bucket))
    assert chunk_controller.seconds_to_compute(32) == pytest.approx(step_seconds(32), rel=0.15)
    assert chunk_controller.seconds_to_compute(128) == pytest.approx(step_seconds(128), rel=0.15)


@pytest.mark.parametrize(
    ("waiting", "target", "budget"),
    [
        # 512 tokens: 16 steps of 32 take 0.99 s, 4 of 128 take 0.63 s, 1 of 512 takes 0.54 s; and a turn that is under way before.
        (waits((512, 0.0)), 1.1, 32),
        (waits((512, 0.0)), 1.0, 128),
        (waits((512, 0.2)), 1.1, 128),
        (waits((512, 0.0)), 0.75, 512),  # 4 of 128 in 0.79 s, and the large one in 1.08 s: neither holds it
        (waits((32, 0.0)), 0.13, 32),
        (waits((32, 0.9), (480, 0.0)), 1.1, 32),  # the second has time
        (waits((480, 0.0), (32, 0.9)), 1.1, 512),  # the second has none, and waits for the first
        (waits(*[(32, 0.0)] * 12), 0.82, 32),  # 12 steps of one prompt in 0.81 s
        (waits(*[(32, 0.0)] * 12), 0.7, 128),  # 3 steps of four prompts
        (waits(), 0.1, 32),
    ],
    ids=str,
)
def test_a_step_is_as_small_as_gives_all_that_wait_their_first_token_in_time(waiting, target, budget):
    assert measured(target_ttft=target).budget(1, waiting) == budget


def test_a_step_of_short_prompts_has_room_for_no_more_of_them_than_rows():
    """512 tokens are those of 16 short prompts, and hold 8: they take two steps."""
    chunk_controller = ChunkSizeController((512, 2048), target_ttft=1.2)
    chunk_controller.observe(512, 0.5)
    chunk_controller.observe(2048, 0.6)
    assert chunk_controller.budget(1, waits(*[(32, 0.0)] * 8)) == 512
    assert chunk_controller.budget(1, waits(*[(32, 0.0)] * 16)) == 2048
    assert chunk_controller.budget(1, waits((512, 0.0))) == 512


def test_the_running_ones_target_goes_first():
    both = measured(target_ttft=0.2, target_itl=0.17)
    assert both.budget(1, waits((512, 0.0))) == 128
    assert measured(target_ttft=0.2).budget(1, waits((512, 0.0))) == 512
    easy = measured(target_ttft=9.0, target_itl=0.17)
    assert easy.budget(1, waits((512, 0.0))) == 32
    assert easy.budget(1, waits((512, 8.3))) == 128, "time is running out"


def test_what_computing_takes():
    chunk_controller = ChunkSizeController(BUCKETS)
    assert chunk_controller.seconds_to_compute(1) == math.inf
    chunk_controller = measured()
    assert chunk_controller.seconds_to_compute(0) == 0
    assert chunk_controller.seconds_to_compute(16) == pytest.approx(step_seconds(32))
    assert chunk_controller.seconds_to_compute(33) == pytest.approx(step_seconds(128))
    assert chunk_controller.seconds_to_compute(512) == pytest.approx(step_seconds(512))
    assert chunk_controller.seconds_to_compute(1040) == pytest.approx(2 * step_seconds(512) + step_seconds(32))
    for _ in range(100):
        chunk_controller.observe(32, 2 * step_seconds(32))
    assert chunk_controller.seconds_to_compute(16) == pytest.approx(2 * step_seconds(32), rel=0.01)
    assert chunk_controller.seconds_to_compute(512) == pytest.approx(2 * step_seconds(512), rel=0.2), "the mesh is slower"


def simulate(
    chunk_controller: ChunkSizeController, seconds_of: Callable[[int], float], decode: Callable[[], float], turns: int = 500
) -> list[tuple[int, float]]:
    """The budgets and the times between two tokens while prompts never end."""
    gaps = []
    for _ in range(turns):
        bucket = chunk_controller.budget(4, waits((10_000, 0.0)))
        prefill_seconds, decode_seconds = seconds_of(bucket), decode()
        chunk_controller.observe(bucket, prefill_seconds)
        chunk_controller.observe_decode(decode_seconds)
        gaps.append((bucket, prefill_seconds + decode_seconds))
    return gaps


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_target_that_can_be_held_is_held_by_a_device_of_any_steadiness(noise):
    random = np.random.default_rng(3)
    vary = lambda seconds: seconds * random.lognormal(0, noise)  # noqa: E731
    gaps = simulate(measured(target_itl=0.2), lambda bucket: vary(step_seconds(bucket)), lambda: vary(DECODE))[50:]
    assert np.mean([seconds <= 0.2 for _, seconds in gaps]) > 0.9
    if noise < 0.3:
        assert np.mean([bucket for bucket, _ in gaps]) > 100, "and not by doing less than can be done"


def test_a_device_that_gets_slower_is_followed_down_and_up_again():
    chunk_controller = measured(target_itl=0.2)
    for speed, bucket in ((1.0, 128), (3.0, 32), (1.0, 128)):
        budgets = [
            budget for budget, _ in simulate(chunk_controller, lambda bucket, speed=speed: speed * step_seconds(bucket), lambda: DECODE)
        ]
        assert set(budgets[50:]) == {bucket}


def test_the_backlog_is_of_all_that_wait_for_their_first_token_in_whole_tiles():
    scheduler = PrefillScheduler(KVManager(PageSpec(1, 1, 1, 16, 4), 101), WaitingQueue(10.0, 512), (128,))
    half_done, whole, preempted, short = (sequences.make(length) for length in (200, 128, 50, 5))
    preempted.token_ids.append(1)
    for sequence in (half_done, whole, preempted, short):
        scheduler.add(sequence)
    assert [tokens for tokens, _ in scheduler.backlog()] == [224, 128, 32]
    scheduler.schedule(128, 9, 0, lambda waiting, prefilling: False)
    assert [tokens for tokens, _ in scheduler.backlog()] == [96, 128, 32]
    scheduler.schedule(96 + 128, 9, 0, lambda waiting, prefilling: False)
    assert [tokens for tokens, _ in scheduler.backlog()] == [32], "what is under way needs no further step"
