"""How many workers the policy wants, from what it sees."""

from __future__ import annotations

from dataclasses import replace

from server.cluster.scaling_policy import PoolBounds, PoolScaler, PoolView, ScalingSettings

BOUNDS, SETTINGS = PoolBounds(1, 8), ScalingSettings(target_ttft=2.0, target_itl=0.1, utilisation=0.5, averaged_over=10.0, patience=60.0)
DECODE = PoolView(0.0, 2, num_sequences=8, max_batch_size=8)


def test_prefill_follows_what_comes_and_what_waits() -> None:
    scaler, arrived, wanted = PoolScaler("prefill", BOUNDS, SETTINGS), 0, 1
    for second in range(120):
        arrived += 2000
        wanted = scaler.wanted(PoolView(float(second), wanted, 0, arrived, tokens_per_second=1000.0))
    assert wanted == 4  # each is given half of what it can do
    assert scaler.wanted(PoolView(120.0, 4, 12_000, arrived, 1000.0)) == 6, "what waits is computed within the target"
    assert scaler.wanted(PoolView(121.0, 4, 10**9, arrived, 1000.0)) == 8
    assert PoolScaler("prefill", BOUNDS, SETTINGS).wanted(PoolView(0.0, 3)) == 3, "before anything is measured"


def test_fewer_only_after_they_were_enough_for_a_while() -> None:
    scaler = PoolScaler("decode", BOUNDS, SETTINGS)
    quiet = replace(DECODE, num_workers=4, num_sequences=1)
    found = [scaler.wanted(replace(quiet, seconds=float(second))) for second in (0, 30, 59, 61)]
    assert found == [4, 4, 4, 1]
    # A burst begins the while anew, and of what comes next as many are kept as were needed in it.
    assert scaler.wanted(replace(quiet, seconds=70.0, num_workers=1, num_sequences=24)) == 4
    assert [scaler.wanted(replace(quiet, seconds=float(second), num_workers=6)) for second in (80, 129, 141)] == [4, 4, 2]


def test_decode_keeps_what_running_sequences_need_and_its_target() -> None:
    assert PoolScaler("decode", BOUNDS, SETTINGS).wanted(DECODE) == 2
    assert PoolScaler("decode", BOUNDS, SETTINGS).wanted(replace(DECODE, itl=0.25)) == 5
    scaler = PoolScaler("decode", PoolBounds(1, 8), replace(SETTINGS, utilisation=1.0))
    running = replace(DECODE, num_workers=4, num_sequences=24)  # three batches
    assert [scaler.wanted(replace(running, seconds=float(second))) for second in (0, 61)] == [4, 3]
    assert [scaler.wanted(replace(running, seconds=float(second), num_workers=3)) for second in (62, 200)] == [3, 3]


def test_what_comes_and_goes_within_the_average_starts_nobody() -> None:
    """A moment with one sequence more than a worker's share, of which there are always a few."""
    scaler = PoolScaler("decode", BOUNDS, replace(SETTINGS, averaged_over=30.0))
    found = [scaler.wanted(replace(DECODE, seconds=float(second), num_sequences=9 if second % 10 == 5 else 7)) for second in range(100)]
    assert set(found) == {2}
