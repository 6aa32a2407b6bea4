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


def test_fewer_only_after_a_while_one_by_one() -> None:
    scaler = PoolScaler("decode", BOUNDS, SETTINGS)
    quiet = replace(DECODE, num_workers=4, num_sequences=1)
    found = [scaler.wanted(replace(quiet, seconds=float(second), num_workers=4)) for second in (0, 30, 59, 61)]
    assert found == [4, 4, 4, 3]
    assert [scaler.wanted(replace(quiet, seconds=float(second), num_workers=3)) for second in (62, 120, 122)] == [3, 3, 2]
    # A burst in between begins the while anew.
    assert scaler.wanted(replace(quiet, seconds=150.0, num_workers=2, num_sequences=16)) == 4
    assert [scaler.wanted(replace(quiet, seconds=float(second), num_workers=2)) for second in (151, 210, 212)] == [2, 2, 1]


def test_decode_keeps_what_running_sequences_need_and_its_target() -> None:
    assert PoolScaler("decode", BOUNDS, SETTINGS).wanted(DECODE) == 2
    assert PoolScaler("decode", BOUNDS, SETTINGS).wanted(replace(DECODE, itl=0.25)) == 5
    scaler = PoolScaler("decode", PoolBounds(1, 8), replace(SETTINGS, utilisation=1.0))
    running = replace(DECODE, num_workers=4, num_sequences=24)  # three batches
    assert [scaler.wanted(replace(running, seconds=float(second))) for second in (0, 61)] == [4, 3]
    assert [scaler.wanted(replace(running, seconds=float(second), num_workers=3)) for second in (62, 200)] == [3, 3]
