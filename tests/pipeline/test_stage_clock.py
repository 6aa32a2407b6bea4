"""How long a pipeline's stages work and wait, in made-up time."""

from __future__ import annotations

import threading
import time

from jaxinfer.pipeline.stage_clock import Ended, StageClock


class Clock:
    """Every look at it is at the time set last."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Output:
    def __init__(self) -> None:
        self.is_filled = threading.Event()

    def block_until_ready(self) -> None:
        self.is_filled.wait()


def fill(clock: Clock, stages: StageClock, output: Output, at: float, stage: int, busy: float) -> None:
    """Have a stage's output be there at a time, and wait until the clock has seen it, by what it adds up to."""
    clock.now = at
    output.is_filled.set()
    deadline = time.monotonic() + 10
    while abs(stages.times[stage].busy - busy) > 1e-9:
        assert time.monotonic() < deadline, (stage, stages.times)
        time.sleep(0.001)


def launch(stages: StageClock, outputs: tuple[Output, Output], after: Ended | None = None) -> Ended:
    first = stages.launched(0, stages.now(), outputs[0], after)
    return stages.launched(1, stages.now(), outputs[1], first)


def test_a_stage_works_from_when_it_could_start_and_waits_for_the_one_before() -> None:
    clock = Clock()
    stages = StageClock(2, clock)
    first, second = (Output(), Output()), (Output(), Output())
    launch(stages, first)
    clock.now = 101.0
    launch(stages, second)
    fill(clock, stages, first[0], 103.0, 0, 3.0)  # from its launch
    fill(clock, stages, second[0], 105.0, 0, 5.0)  # from the end of the step before it
    fill(clock, stages, first[1], 106.0, 1, 3.0)  # from the first stage's end, 103
    fill(clock, stages, second[1], 108.0, 1, 5.0)  # at once after its own step before
    assert [times.waiting for times in stages.times] == [0.0, 3.0]  # from 100 to 103
    clock.now = 120.0  # nothing was launched meanwhile: nobody's bubble
    third = (Output(), Output())
    launch(stages, third)
    fill(clock, stages, third[0], 121.0, 0, 6.0)
    fill(clock, stages, third[1], 125.0, 1, 9.0)
    assert [times.waiting for times in stages.times] == [0.0, 4.0]
    stages.begin()
    again = (Output(), Output())
    launch(stages, again)
    fill(clock, stages, again[0], 127.0, 0, 2.0)
    fill(clock, stages, again[1], 128.0, 1, 1.0)
    assert [times.waiting for times in stages.times] == [0.0, 2.0]


def test_the_first_stage_waits_for_the_token_that_the_last_one_makes() -> None:
    clock = Clock()
    stages = StageClock(2, clock)
    first, second = (Output(), Output()), (Output(), Output())
    ended = launch(stages, first)
    launch(stages, second, ended)
    fill(clock, stages, first[0], 102.0, 0, 2.0)
    fill(clock, stages, first[1], 105.0, 1, 3.0)
    fill(clock, stages, second[0], 107.0, 0, 4.0)
    assert stages.times[0].waiting == 3.0


def test_a_step_that_fails_holds_up_nobody() -> None:
    class Failing(Output):
        def block_until_ready(self) -> None:
            raise RuntimeError("the device is gone")

    clock = Clock()
    stages = StageClock(2, clock)
    launch(stages, (Failing(), Failing()))
    after = (Output(), Output())
    launch(stages, after)
    fill(clock, stages, after[0], 102.0, 0, 2.0)
    fill(clock, stages, after[1], 103.0, 1, 1.0)


def test_its_threads_end_with_it() -> None:
    before = set(threading.enumerate())
    stages = StageClock(3)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    del stages
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
