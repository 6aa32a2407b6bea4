"""Retry-After: the queue, over the pace at which it moves."""

import pytest

from server.admission import HALF_LIFE, AdmissionRate


def serve(admissions, start, count, seconds_each):
    """So many requests come together and are admitted one after the other. Returns the time of the last."""
    for _ in range(count):
        admissions.wait(start)
    for number in range(1, count + 1):
        admissions.admit(start + number * seconds_each)
    return start + count * seconds_each


def test_it_is_the_time_that_those_waiting_take_at_the_recent_pace():
    admissions = AdmissionRate()
    now = serve(admissions, 1000.0, 10, 2.0)
    for _ in range(5):
        admissions.wait(now)
    assert admissions.seconds_until_admitted(now) == pytest.approx(10, rel=0.2)


def test_an_idle_hour_changes_nothing():
    admissions = AdmissionRate()
    now = serve(admissions, 1000.0, 10, 2.0)
    for number in range(5):
        admissions.wait(now + 3600 + number / 1000)
    assert admissions.seconds_until_admitted(now + 3601) == pytest.approx(10, rel=0.2)


def test_a_pace_that_changed_is_soon_the_recent_one():
    admissions = AdmissionRate()
    now = serve(admissions, 1000.0, 100, 0.1)
    now = serve(admissions, now, 30, 8 * HALF_LIFE / 30)
    for _ in range(4):
        admissions.wait(now)
    assert admissions.seconds_until_admitted(now) == pytest.approx(4 * 8 * HALF_LIFE / 30, rel=0.2)


def test_a_queue_that_stands_still_is_ever_longer():
    admissions = AdmissionRate()
    now = serve(admissions, 1000.0, 10, 1.0)
    admissions.wait(now)
    at_once, later, much_later = (admissions.seconds_until_admitted(now + seconds) for seconds in (0, 60, 600))
    assert 0.5 < at_once < later / 2 < much_later / 4


def test_before_the_first_admission_it_is_the_time_waited_so_far():
    admissions = AdmissionRate()
    assert admissions.seconds_until_admitted(1000.0) == 0
    admissions.wait(1000.0)
    admissions.wait(1001.0)
    assert admissions.seconds_until_admitted(1002.0) == pytest.approx(2, rel=0.1)
    admissions.leave(1002.0)
    admissions.leave(1002.0)
    assert admissions.seconds_until_admitted(9000.0) == pytest.approx(2, rel=0.1)
