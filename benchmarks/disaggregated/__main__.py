"""`python -m benchmarks.disaggregated`: transport, router, routing, first tokens and gaps. Ratios, in one run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.disaggregated import autoscaling, coding, router_load, routing, serving, transport
from benchmarks.machine import machine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disaggregated", description=__doc__)
    parts = ("transport", "coding", "router", "routing", "pools", "hop", "fetch", "gaps")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[], help="all without any")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", type=Path, help="requests with hash_ids, one JSON object a line, for `routing` and `pools`")
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 250.0, 500.0], help="requests a second, for `router`")
    parser.add_argument("--num-requests", type=int, default=0, help="of a last, long row of `router`, for the memory")
    given = parser.parse_args()

    def routing_part() -> str:
        if given.trace is None:
            return "left out: give --trace"
        trace, machines = routing.read_trace(given.trace), routing.Machines()
        head = f"{len(trace):,} requests on {machines.number} simulated workers of {machines.tokens_per_second:,.0f} tokens/s, {machines.num_blocks:,} blocks each"
        return f"{head}\n{routing.table(routing.compare(trace, machines))}"

    def pools_part() -> str:
        if given.trace is None:
            return "left out: give --trace"
        return autoscaling.compare(routing.read_trace(given.trace), autoscaling.PoolMachines())

    work: dict[str, Callable[[], str]] = {
        "transport": lambda: transport.compare(given.rounds),
        "coding": lambda: coding.compare((10e6, 30e6, 100e6, 0.0), given.rounds),
        "router": lambda: "\n".join([router_load.HEAD, *(row.row() for row in router_load.measure(given.rates, 10.0, given.num_requests))]),
        "routing": routing_part,
        "pools": pools_part,
        "hop": lambda: serving.compare_first_tokens((16, 64, 256), 25),
        "fetch": lambda: serving.compare_fetches((128, 512), 9),
        "gaps": lambda: "\n".join(serving.compare_gaps(given.rounds, serving.GapsLoad(chunk_size=size)) for size in (64, 256)),
    }
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, Python {about['python']}", flush=True)
    for part in given.parts or parts:
        print(f"\n== {part}\n{work[part]()}", flush=True)


if __name__ == "__main__":
    main()
