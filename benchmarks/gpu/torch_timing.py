"""Device time of torch's calls: replays of a CUDA graph of them, so that launches cost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.measure import CallTimes

_MEASUREMENT_S = 0.02


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def per_call(calls: Sequence[Callable[[], Any]], expected_s: float, repeats: int) -> CallTimes:
    """Seconds of one of the calls, which use several sets of inputs, interleaved. On a CPU they are timed directly."""
    for call in calls:
        call()
    if device() == "cpu":
        return CallTimes.of([_host_seconds(calls) / len(calls) for _ in range(repeats)])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    rounds = max(2, min(200, int(_MEASUREMENT_S / (expected_s * len(calls)))))
    device_seconds(graph.replay, rounds)
    return CallTimes.of([device_seconds(graph.replay, rounds) / len(calls) for _ in range(repeats)])


def device_seconds(run: Callable[[], Any], rounds: int) -> float:
    """Seconds of one round, between events of the device."""
    if device() == "cpu":
        return _host_seconds([run] * rounds) / rounds
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(rounds):
        run()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / rounds


def _host_seconds(calls: Sequence[Callable[[], Any]]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - began
