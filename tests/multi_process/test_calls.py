"""Calls that are recorded, and made again elsewhere."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.multi_process.calls import Recorder, Replayer


class Adder:
    """Keeps a total on the device."""

    def __init__(self, start: int) -> None:
        self.total = jnp.asarray(start)
        self.num_calls = 0

    @property
    def doubled(self) -> int:
        return 2 * int(self.total)

    def put(self, value):
        return (jnp.asarray(value),)

    def add(self, values, *, times=1):
        self.num_calls += 1
        self.total = self.total + times * values[0]
        return self.total

    def _hidden(self):
        self.num_calls += 100


@pytest.fixture
def pair():
    """A recorded target, its copy elsewhere, what tells of calls, and what makes them again."""
    messages: list[bytes] = []
    here, there = Adder(0), Adder(0)
    recorder, replayer = Recorder(messages.append), Replayer()
    recorded = recorder.record("adder", here)
    replayer.add("adder", there)
    return recorder, recorded, replayer, there, messages


def test_calls_are_made_again_in_order_with_the_arrays_that_earlier_ones_returned(pair):
    recorder, recorded, replayer, there, messages = pair
    recorder.start()
    three, five = recorded.put(np.asarray(3)), recorded.put(np.asarray(5))
    recorded.add(three)
    recorded.add(five, times=2)
    recorded.add((recorded.add(three),))
    for message in messages:
        replayer.make(message)
    assert int(there.total) == int(recorded.total) == 32
    assert there.num_calls == recorded.num_calls == 4


def test_nothing_is_told_before_the_start_nor_of_what_is_no_public_method(pair):
    recorder, recorded, _, _, messages = pair
    recorded.add(recorded.put(np.asarray(3)))
    assert not messages
    recorder.start()
    assert (recorded.doubled, recorded.num_calls) == (6, 1)
    recorded._hidden()
    assert not messages


def test_a_call_is_told_before_it_is_made(pair):
    recorder, recorded, _, _, messages = pair
    recorder.start()
    with pytest.raises(TypeError):
        recorded.add(None)
    assert len(messages) == 1


def test_arrays_that_are_let_go_of_are_let_go_of_everywhere(pair):
    recorder, recorded, replayer, _, messages = pair
    recorder.start()
    kept = recorded.put(np.asarray(1))
    for _ in range(20):
        recorded.add(recorded.put(np.asarray(2)))
    recorded.add(kept)
    for message in messages:
        replayer.make(message)
    assert len(replayer._held) <= 5


def test_an_array_that_came_back_from_a_later_call_too_stays_known(pair):
    recorder, recorded, replayer, there, messages = pair
    recorder.start()
    total = recorded.add(recorded.put(np.asarray(4)))
    again = recorded.put(total)  # the very same array
    del total
    recorded.add(again)
    for message in messages:
        replayer.make(message)
    assert int(there.total) == 8


def test_a_call_of_what_is_not_shared_is_refused(pair):
    recorder, _, replayer, _, messages = pair
    recorder.start()
    recorder.record("other", Adder(0)).put(np.asarray(1))
    with pytest.raises(ValueError, match=r"other\.put, which this process does not have"):
        replayer.make(messages[0])
