"""The requirements on a server after a soak. Each check has its figure and its limit."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.http_load import LoadOutcome, RequestRecord
from benchmarks.soak_monitor import ServerSample
from benchmarks.soak_traffic import SentRequest

SETTLING = 0.25  # share of a phase that is not measured: the work of the phase before ends in it
GROWTH = 1.0  # MiB a minute by which memory may seem to grow
MIN_OVERLOAD_SHARE = 0.9  # share of the peak throughput that must remain under overload
WINDOW = 10.0  # seconds of which memory's minimum is used
MIN_MEMORY, MIN_PHASE = 150.0, 20.0  # seconds below which memory, and a phase's throughput, say nothing
# beginnings of lines that must not be in a log, after a time or without
ERROR = re.compile(r"\s*(\S+Z )?(ERROR|CRITICAL|Traceback)\b")
QUIET = 0.05  # share of the machine that other processes may use while throughput is measured
SPARE = 4  # files and threads that may be open more than before


@dataclass(frozen=True, slots=True)
class SoakCheck:
    name: str
    is_met: bool | None  # None: the soak was too short to judge
    figure: str
    limit: str


@dataclass(frozen=True, slots=True)
class Phase:
    """A period of the soak. `load` is the rate over the capacity, None where the loop is closed."""

    load: float | None
    start: float  # seconds since monitoring began
    end: float

    @property
    def name(self) -> str:
        return "full" if self.load is None else f"{self.load:g}x"

    @property
    def measured_from(self) -> float:
        return self.start + SETTLING * (self.end - self.start)


def rate(samples: Sequence[ServerSample], phase: Phase, counter: Callable[[ServerSample], float]) -> float | None:
    """How fast a counter rose in the phase once it had settled, a second; None where there are too few samples."""
    within = [s for s in samples if phase.measured_from <= s.at <= phase.end]
    if len(within) < 2:
        return None
    return (counter(within[-1]) - counter(within[0])) / (within[-1].at - within[0].at)


def throughput(samples: Sequence[ServerSample], phase: Phase) -> float | None:
    """Output tokens a second."""
    return rate(samples, phase, lambda s: s.output_tokens)


def medians(samples: Sequence[ServerSample], phases: Sequence[Phase], counter: Callable[[ServerSample], float]) -> dict[str, float]:
    """Of each load, the median of its phases' rates."""
    found: dict[str, list[float]] = {}
    for phase in phases:
        if (value := rate(samples, phase, counter)) is not None:
            found.setdefault(phase.name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def overload_check(samples: Sequence[ServerSample], phases: Sequence[Phase], overload: float, num_cores: int) -> SoakCheck:
    """Compares throughput under the highest load with the best under any. Where other processes took more of the
    machine than `QUIET` allows, low throughput is not a failure."""
    rates, name = medians(samples, phases, lambda s: s.output_tokens), f"{overload:g}x"
    title, limit = f"throughput at {name} overload", f"at least {MIN_OVERLOAD_SHARE:.0%} of the peak"
    shortest = min(p.end - p.measured_from for p in phases)
    if shortest < MIN_PHASE or name not in rates:
        return SoakCheck(title, None, f"a phase measures {shortest:.0f} s: too short", limit)
    peak = max(rates, key=lambda load: rates[load])
    share = rates[name] / rates[peak] if rates[peak] else 0.0
    figure = f"{share:.0%} ({rates[name]:,.0f} of {rates[peak]:,.0f} tokens/s, at {peak} load)"
    others = max(medians(samples, phases, lambda s: s.other_cpu).values())
    if share < MIN_OVERLOAD_SHARE and others > QUIET * num_cores:
        return SoakCheck(title, None, f"{figure}; other processes took {others:.1f} of {num_cores} cores", limit)
    return SoakCheck(title, share >= MIN_OVERLOAD_SHARE, figure, limit)


def growth(samples: Sequence[ServerSample], start: float, end: float) -> float | None:
    """MiB a minute between two times. It is the median slope of all pairs (Theil and Sen) of the lowest memory in each
    window: a step's buffers come and go, and a few jumps don't move it. None where there are too few windows."""
    windows: dict[int, list[float]] = {}
    for sample in samples:
        if start <= sample.at <= end:
            windows.setdefault(int((sample.at - start) // WINDOW), []).append(sample.rss)
    if len(windows) < 3:
        return None
    at, least = np.array(list(windows)) * WINDOW / 60, np.array([min(rss) for rss in windows.values()])
    earlier, later = np.triu_indices(len(at), 1)
    return float(np.median((least[later] - least[earlier]) / (at[later] - at[earlier])))


def memory_check(samples: Sequence[ServerSample], phases: Sequence[Phase]) -> SoakCheck:
    """Flat in the second half of the soak: every load and size of request has occurred by then."""
    start, end = (phases[0].start + phases[-1].end) / 2, phases[-1].end
    slope, limit = growth(samples, start, end), f"at most {GROWTH:g} MiB/min"
    if slope is None or end - start < MIN_MEMORY:
        return SoakCheck("memory flat", None, f"its second half is {end - start:.0f} s: too short", limit)
    within = [s.rss for s in samples if start <= s.at <= end]
    return SoakCheck("memory flat", slope <= GROWTH, f"{slope:+.2f} MiB/min ({min(within):,.0f} to {max(within):,.0f} MiB)", limit)


def page_check(last: ServerSample) -> SoakCheck:
    figure = f"{last.pages_used:.1%} of the pages held, {last.waiting + last.running:.0f} requests left"
    return SoakCheck("no page lost", last.is_idle, figure, "none after the last answer")


def handle_check(before: ServerSample, last: ServerSample) -> SoakCheck:
    files, threads = last.num_files - before.num_files, last.num_threads - before.num_threads
    return SoakCheck(
        "no socket or thread lost",
        max(files, threads) <= SPARE,
        f"{files:+d} files, {threads:+d} threads",
        f"at most {SPARE} more than before",
    )


def answer_check(pairs: Sequence[tuple[SentRequest, RequestRecord]], metrics: Mapping[str, float]) -> SoakCheck:
    """Every request got an allowed answer, according to the client, and no 5xx, according to the server."""
    wrong = Counter(
        f"{sent.kind}: {record.outcome} {record.status or ''} {record.code}".strip() for sent, record in pairs if not sent.is_right(record)
    )
    told = sum(count for name, count in metrics.items() if name.startswith("jaxinfer_http_requests_total") and 'code="5' in name)
    counts = Counter(record.outcome for _, record in pairs)
    figure = ", ".join(f"{counts[outcome]:,} {outcome}" for outcome in LoadOutcome if counts[outcome])
    if wrong or told:
        figure += "; wrong: " + "; ".join(
            [*(f"{count} {what}" for what, count in wrong.most_common(5)), f"{told:.0f} 5xx told by the server"]
        )
    return SoakCheck("every request answered or refused", not wrong and not told, figure, "no hang, no 5xx, no broken answer")


def compilation_check(last: ServerSample) -> SoakCheck:
    return SoakCheck("nothing compiled while serving", not last.compilations, f"{last.compilations:.0f} compilations", "0")


def same_answer_check(before: RequestRecord, after: RequestRecord) -> SoakCheck:
    is_same = before.outcome is after.outcome is LoadOutcome.ANSWERED and before.choices == after.choices
    return SoakCheck(
        "the same answer as before", is_same, "equal" if is_same else f"{after.outcome}: {after.choices}", "equal greedy tokens"
    )


def log_check(lines: Sequence[str]) -> SoakCheck:
    errors = [line for line in lines if ERROR.match(line)]
    return SoakCheck("no error in the log", not errors, errors[0][:200] if errors else "none", "none")


def end_check(status: int | None) -> SoakCheck:
    return SoakCheck(
        "ends when told to", status == 0, "still there" if status is None else f"exit status {status}", "exit status 0 after SIGTERM"
    )
