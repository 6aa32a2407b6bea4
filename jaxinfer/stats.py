"""EngineStats: counters, gauges and timings of an engine; any thread may read them. No exporter here, no JAX."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxinfer.start_progress import StartProgress

# Upper bounds in seconds as in Prometheus; the last bucket is open.
TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(TIME_BUCKETS) + 1))  # not cumulative
    total: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=1024))

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(TIME_BUCKETS, seconds)] += times
        self.total += seconds * times
        self.recent.append(seconds)

    @property
    def num_observed(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float | None:
        """Quantile of the last 1,024 observations, in seconds; None before the first."""
        ordered = sorted(self.recent)
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else None


@dataclass(frozen=True, slots=True)
class TierStats:
    """KV pages in host memory and on disk. Gauges are current values, counters only grow."""

    # Gauges
    host_size: int  # bytes available
    host_pages: int
    host_bytes: int  # used by these pages
    disk_size: int
    disk_pages: int
    disk_bytes: int
    num_unsaved: int  # in host memory, not yet written to disk
    host_bytes_per_second: float
    disk_bytes_per_second: float
    peer_bytes_per_second: float  # from other engines
    # Counters
    num_host_hits: int  # pages fetched from host memory
    num_disk_hits: int
    num_peer_hits: int  # fetched from other engines
    num_dropped: int  # evicted without a place: the disk is too slow, full or failing
    num_failed_writes: int
    written_bytes: int  # to disk
    refused: dict[str, int] = field(default_factory=dict)  # reason -> pages of the file that were rejected


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Imbalance of experts over all steps since the start: the busiest one's tokens as a multiple of the mean. 1: all
    had the same number."""

    of_experts: float  # mean over layers
    most_of_experts: float  # in the worst layer
    of_devices: float | None  # with expert parallelism, of devices: mean over layers; else None


@dataclass(slots=True)
class StageTimes:
    """Times of a pipeline stage, in seconds."""

    busy: float = 0.0
    waiting: float = 0.0  # for another stage, with a step launched and nothing else to do: bubbles


@dataclass(slots=True)
class EngineStats:
    """Counters only grow; gauges are of the last step. Seconds and bytes throughout."""

    # Start
    start: StartProgress = field(default_factory=StartProgress)  # until the engine is ready
    load_seconds: float = 0.0
    compile_seconds: float = 0.0
    num_programs: int = 0
    num_compilations: int = 0  # XLA compilations of this process, cached ones not counted
    num_compilations_after_ready: int = 0  # in the engine's steps; stays 0, since all programs are compiled before
    compute_type: str = ""  # of products, and the reason for it
    weights: str = ""  # weight format, and which tensors of the checkpoint were dequantised
    weights_version: int = 1  # 1 until they are replaced
    is_asleep: bool = False
    kv_dtype: str = ""  # type of cached keys and values, and of which scales
    kv_tokens: int = 0  # the longest context that the decode mesh's pages hold
    # Memory in bytes by use and mesh, such as "prefill weights"
    memory: dict[str, int] = field(default_factory=dict)
    device_bytes: int = 0  # memory that a device has; a CPU's is the machine's
    prefill_devices: tuple[str, ...] = ()
    decode_devices: tuple[str, ...] = ()
    prefill_layout: str = "tp=1"
    decode_layout: str = "tp=1"
    heads: dict[str, str] = field(default_factory=dict)  # cost of padding heads, by role or "shared"
    sampling_defaults: str = ""  # of requests that leave them out, such as "temperature 0.2"
    latents: dict[str, str] = field(default_factory=dict)  # how devices share latents, by role or "shared"
    # One a pipeline stage, by role or "shared"; they only grow
    stage_times: dict[str, list[StageTimes]] = field(default_factory=dict)
    # Targets, in seconds
    target_ttft: float | None = None
    target_itl: float | None = None
    # Gauges
    num_waiting: int = 0  # queued, no prefill yet
    num_prefilling: int = 0
    num_running: int = 0  # in the decode batch
    num_incoming: int = 0  # that another engine prefills for this one
    prefill_pages_used: int = 0
    prefill_pages: int = 0
    decode_pages_used: int = 0
    decode_pages: int = 0
    prefill_pages_cached: int = 0  # in the prefix cache, including pages in use
    decode_pages_cached: int = 0
    peak_pages_used: int = 0  # most decode pages ever in use at once
    # Counters
    num_requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> sequences
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_restored_tokens: int = 0  # prompt tokens whose KV came back from host memory or disk
    num_first_tokens_in_time: int = 0  # of time_to_first_token's, those within target_ttft; all without a target
    num_gaps_in_time: int = 0  # of inter_token_latency's, those within target_itl; all without a target
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_embedded_texts: int = 0
    num_embedded_tokens: int = 0
    num_pages_moved: int = 0  # between distinct meshes
    num_pages_received: int = 0  # from other engines
    num_taken_over: int = 0  # sequences that another engine was to prefill and did not
    host_seconds: float = 0.0  # host work of the engine's thread in decode steps: scheduling, dispatch, reading, text
    prefill_host_seconds: float = 0.0  # the same for prefill steps, with admission and hand-off
    # KV tiers; any thread may call it; None: there are none
    read_tiers: Callable[[], TierStats] | None = None
    # By role, for models with experts once they had tokens; any thread may call it; None: no experts
    read_expert_loads: Callable[[], dict[str, ExpertLoad]] | None = None
    # Latencies
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    queue_seconds: Histogram = field(default_factory=Histogram)

    def bubbles(self) -> dict[str, float]:
        """Share of time with launched work in which stages waited for another, by role or "shared". Empty before the
        first step."""
        found = {}
        for role, stages in self.stage_times.items():
            busy, waiting = sum(times.busy for times in stages), sum(times.waiting for times in stages)
            if busy:
                found[role] = waiting / (busy + waiting)
        return found

    def targets(self) -> dict[str, tuple[float, float | None]]:
        """For each latency target that is set ("ttft", "itl"): its seconds, and the share of first tokens or of gaps
        between tokens that met it; None before the first."""
        measured = {
            "ttft": (self.target_ttft, self.num_first_tokens_in_time, self.time_to_first_token.num_observed),
            "itl": (self.target_itl, self.num_gaps_in_time, self.inter_token_latency.num_observed),
        }
        return {name: (target, kept / total if total else None) for name, (target, kept, total) in measured.items() if target is not None}
