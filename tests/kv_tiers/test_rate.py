from __future__ import annotations

import pytest

from jaxinfer.kv_tiers.rate import HALF_LIFE, Rate


def test_a_guess_stands_until_something_is_measured():
    rate = Rate(1e9)
    assert rate.seconds_for(0, 0.0) == 0
    assert rate.seconds_for(2 * 10**9, 5.0) == pytest.approx(2)
    assert rate.bytes_per_second(1e6) == pytest.approx(1e9)


def test_large_measurements_outweigh_the_guess_and_small_ones():
    rate = Rate(1e9)
    rate.observe(10**9, 10.0, now=100.0)
    assert rate.bytes_per_second(100.0) == pytest.approx(1e8, rel=0.01)
    rate.observe(10**6, 1.0, now=100.0)
    assert rate.bytes_per_second(100.0) == pytest.approx(1e9 / 11, rel=0.01)
    assert rate.seconds_for(500, 100.0) == pytest.approx(5e-6, rel=0.12)


def test_newer_measurements_replace_older_ones():
    rate = Rate(1e9)
    for now in range(0, 600, 10):
        rate.observe(10**9, 10.0, float(now))
    for now in range(600, 900, 10):
        rate.observe(10**9, 2.0, float(now))
    assert rate.bytes_per_second(900.0) == pytest.approx(5e8, rel=0.15)


def test_a_tier_that_was_slow_once_is_tried_again():
    rate = Rate(1e9)
    rate.observe(2**24, 100.0, now=0.0)
    assert rate.bytes_per_second(0.0) < 2e5
    assert rate.bytes_per_second(2 * HALF_LIFE) < 1e6
    assert rate.bytes_per_second(40 * HALF_LIFE) == pytest.approx(1e9, rel=0.01)
