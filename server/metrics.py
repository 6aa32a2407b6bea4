"""EngineStats for Prometheus, and the few numbers the chat page shows."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from jaxinfer.stats import TIME_BUCKETS, EngineStats, ExpertLoad, Histogram, TierStats
from server.backend import ModelReport
from server.batches.runner import BatchCounts
from server.cluster_stats import ClusterStats
from server.usage import Outcome, TenantTotals

Answered = Mapping[tuple[str, str, int], int]  # HTTP requests by method, route and status
UsageByTenant = Mapping[str, TenantTotals]  # by tenant

_COUNTERS = {
    "num_requests": ("requests", "Requests taken in"),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens, cached ones among them"),
    "num_cached_tokens": ("cached_prompt_tokens", "Prompt tokens whose KV was found rather than computed"),
    "num_restored_tokens": ("restored_prompt_tokens", "Prompt tokens whose KV came back from host memory or disk"),
    "num_first_tokens_in_time": ("first_tokens_in_time", "First tokens within --target-ttft; all of them if there is none"),
    "num_gaps_in_time": ("gaps_in_time", "Times between two tokens within --target-itl; all of them if there is none"),
    "num_output_tokens": ("output_tokens", "Tokens generated"),
    "num_preemptions": ("preemptions", "Requests that gave up their pages to be recomputed later"),
    "num_prefill_steps": ("prefill_steps", "Runs of a prefill program"),
    "num_decode_steps": ("decode_steps", "Runs of a decode program"),
    "num_embedded_texts": ("embedded_texts", "Texts that embeddings were made of"),
    "num_embedded_tokens": ("embedded_tokens", "Tokens of these texts"),
    "num_pages_received": ("kv_pages_received", "KV pages pulled from other engines"),
    "num_taken_over": ("requests_taken_over", "Sequences that another engine was to prefill and did not"),
    "num_pages_moved": ("kv_pages_moved", "KV pages handed over between distinct meshes"),
    "num_compilations": ("compilations", "XLA compilations of this process"),
    "num_compilations_after_ready": ("compilations_after_ready", "XLA compilations while serving; 0 if all is well"),
    "prefill_host_seconds": (
        "prefill_host_seconds",
        "Seconds that prefill steps, admission and hand-off kept the engine's thread at work, outside the device programs",
    ),
    "host_seconds": ("decode_host_seconds", "Seconds that decode steps kept the engine's thread at work, outside the device programs"),
}
_GAUGES = {
    "num_waiting": ("requests_waiting", "Requests queued, no prefill yet"),
    "num_prefilling": ("requests_prefilling", "Requests whose prompt is being computed"),
    "num_incoming": ("requests_incoming", "Sequences that another engine prefills for this one"),
    "num_running": ("requests_running", "Sequences in the decode batch"),
    "device_bytes": ("device_memory_bytes", "Memory that one of its devices has; a CPU's is the machine's"),
    "load_seconds": ("load_seconds", "Seconds that loading the weights took"),
    "compile_seconds": ("compile_seconds", "Seconds that compiling the programs took"),
    "weights_version": ("weights_version", "How often the weights were replaced, and 1"),
    "is_asleep": ("asleep", "1 while the model sleeps, without weights on its devices"),
    "kv_tokens": ("kv_tokens", "Tokens of one context that the decode mesh's KV pages hold"),
    "peak_pages_used": ("kv_pages_peak", "Most KV pages of the decode mesh ever in use at once"),
    "num_programs": ("programs", "Compiled programs in memory"),
}
_HISTOGRAMS = {
    "time_to_first_token": ("time_to_first_token_seconds", "From a request's arrival to its first token"),
    "inter_token_latency": ("inter_token_latency_seconds", "Between two tokens of a sequence"),
    "queue_seconds": ("queue_seconds", "From a request's arrival to its first prefill"),
}
_WORKER_GAUGES = {
    "num_waiting": ("waiting_requests", "Requests of a worker that wait for prefill"),
    "num_running": ("running_sequences", "Sequences in a worker's decode batch"),
    "num_incoming": ("incoming_handoffs", "Sequences that other workers prefill for this one"),
    "num_kept_handoffs": ("kept_handoffs", "Hand-offs whose pages wait on this worker's host, under a lease"),
    "num_pending_tokens": ("pending_tokens", "Prompt tokens that a worker has to compute, as far as routers know"),
    "num_used_pages": ("used_pages", "KV pages of a worker's sequences"),
    "num_free_pages": ("free_pages", "KV pages that a worker has room for"),
    "num_cached_blocks": ("cached_blocks", "Blocks of tokens in a worker's prefix cache, as it told this router"),
    "prefill_tokens_per_second": ("prefill_tokens_per_second", "How fast a worker computes prompts, as measured lately"),
    "pull_bytes_per_second": ("pull_bytes_per_second", "How fast a worker pulls pages, as measured since its start"),
}
_WORKER_COUNTERS = {
    "num_new_prompt_tokens": ("new_prompt_tokens", "Prompt tokens of a worker's requests, without those that were cached"),
    "num_pages_received": ("received_pages", "KV pages of hand-offs that a worker has pulled from others"),
    "num_bytes_pulled": ("pulled_bytes", "Bytes of pages that a worker has pulled from others"),
    "num_wire_bytes_pulled": ("pulled_wire_bytes", "Bytes that these pages were on the wire: fewer where they came coded"),
    "pull_seconds": ("pull_seconds", "Seconds that these took, from each page's first byte to its last"),
}
_TENANT_COUNTERS = {
    "input_tokens": "Prompt tokens of ended requests, cached ones among them, by tenant",
    "cached_input_tokens": "Prompt tokens whose KV was found rather than computed, by tenant",
    "output_tokens": "Tokens generated for ended requests, by tenant",
    "queue_seconds": "Seconds that ended requests waited, by tenant",
    "prefill_seconds": "Device time of ended requests' prefill, by tenant",
    "decode_seconds": "Device time of ended requests' decode, by tenant",
}


class _EngineCollector(Collector):
    """Reads an engine's stats when they are scraped, so that the engine never waits for an exporter."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        for field, (name, help) in _COUNTERS.items():
            yield CounterMetricFamily(f"jaxinfer_{name}", help, value=getattr(stats, field))
        for field, (name, help) in _GAUGES.items():
            yield GaugeMetricFamily(f"jaxinfer_{name}", help, value=getattr(stats, field))
        for field, (name, help) in _HISTOGRAMS.items():
            yield _histogram(f"jaxinfer_{name}", help, getattr(stats, field))
        yield from self._labelled()
        yield from self._stages()
        yield from self._targets()
        if stats.read_expert_loads is not None:
            yield _expert_metrics(stats.read_expert_loads())
        if stats.read_tiers is not None:
            yield from _tier_metrics(stats.read_tiers())

    def _labelled(self) -> Iterable[Metric]:
        stats = self._stats
        used = GaugeMetricFamily("jaxinfer_kv_pages_used", "KV pages in use", labels=["mesh"])
        cached = GaugeMetricFamily("jaxinfer_kv_pages_cached", "KV pages that the prefix cache keeps, some in use", labels=["mesh"])
        total = GaugeMetricFamily("jaxinfer_kv_pages", "KV pages there are", labels=["mesh"])
        devices = GaugeMetricFamily("jaxinfer_mesh_devices", "Devices of the mesh", labels=["mesh"])
        for mesh in ("prefill", "decode"):
            used.add_metric([mesh], getattr(stats, f"{mesh}_pages_used"))
            cached.add_metric([mesh], getattr(stats, f"{mesh}_pages_cached"))
            total.add_metric([mesh], getattr(stats, f"{mesh}_pages"))
            devices.add_metric([mesh], len(getattr(stats, f"{mesh}_devices")))
        memory = GaugeMetricFamily("jaxinfer_memory_bytes", "Device memory by what holds it", labels=["part"])
        for part, num_bytes in dict(stats.memory).items():
            memory.add_metric([part], num_bytes)
        finished = CounterMetricFamily("jaxinfer_sequences_finished", "Sequences finished, by reason", labels=["reason"])
        for reason, count in dict(stats.finished).items():
            finished.add_metric([str(reason)], count)
        yield from (used, cached, total, devices, memory, finished)

    def _stages(self) -> Iterable[Metric]:
        stages = ("mesh", "stage")
        busy = CounterMetricFamily("jaxinfer_stage_busy_seconds", "Seconds that a pipeline's stage worked", labels=stages)
        waiting = CounterMetricFamily(
            "jaxinfer_stage_bubble_seconds", "Seconds that it waited for the stage before it, with a step launched", labels=stages
        )
        for role, of_role in self._stats.stage_times.items():
            for number, times in enumerate(of_role, 1):
                busy.add_metric([role, str(number)], times.busy)
                waiting.add_metric([role, str(number)], times.waiting)
        if self._stats.stage_times:
            yield from (busy, waiting)

    def _targets(self) -> Iterable[Metric]:
        seconds = GaugeMetricFamily("jaxinfer_target_seconds", "Latency targets that prefill steers by, where set", labels=["target"])
        met = GaugeMetricFamily("jaxinfer_target_met_ratio", "Share of what was measured that met its target", labels=["target"])
        for name, (target, share) in self._stats.targets().items():
            seconds.add_metric([name], target)
            if share is not None:
                met.add_metric([name], share)
        yield from (seconds, met)


class _ModelsCollector(Collector):
    """Of several models: what an engine has of each, with its name as a label, and who waits for it to be awake."""

    def __init__(self, models: Mapping[str, ModelReport]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, model in self._models.items():
            for metric in _EngineCollector(model.stats).collect():
                metric.samples = [sample._replace(labels={"model": name, **sample.labels}) for sample in metric.samples]
                if metric.name in families:
                    families[metric.name].samples += metric.samples
                else:
                    families[metric.name] = metric
        yield from families.values()
        waiting = GaugeMetricFamily("jaxinfer_model_requests_waiting", "Requests that wait until their model is awake", labels=["model"])
        wakes = CounterMetricFamily("jaxinfer_model_wakes", "How often a model was woken for requests", labels=["model"])
        sleeps = CounterMetricFamily("jaxinfer_model_sleeps", "How often a model was put to sleep to make room", labels=["model"])
        for name, model in self._models.items():
            waiting.add_metric([name], model.num_waiting)
            wakes.add_metric([name], model.num_wakes)
            sleeps.add_metric([name], model.num_sleeps)
        yield from (waiting, wakes, sleeps)


class _ServerCollector(Collector):
    """HTTP, batches and tenants."""

    def __init__(self, answered: Answered, usage: UsageByTenant, batches: BatchCounts | None) -> None:
        self._answered, self._usage, self._batches = answered, usage, batches

    def collect(self) -> Iterable[Metric]:
        answered = CounterMetricFamily("jaxinfer_http_requests", "HTTP requests answered", labels=["method", "route", "code"])
        for (method, route, code), count in dict(self._answered).items():
            answered.add_metric([method, route, str(code)], count)
        yield answered
        yield from self._by_tenant()
        if self._batches is not None:
            yield from self._batch_metrics(self._batches)

    def _batch_metrics(self, batches: BatchCounts) -> Iterable[Metric]:
        lines = CounterMetricFamily("jaxinfer_batch_lines", "Lines of batches answered, by whether with an error", labels=["outcome"])
        lines.add_metric(["completed"], batches.num_completed)
        lines.add_metric(["failed"], batches.num_failed)
        yield lines
        yield GaugeMetricFamily("jaxinfer_batch_lines_waiting", "Lines of batches in progress without an answer", value=batches.num_waiting)

    def _by_tenant(self) -> Iterable[Metric]:
        usage = dict(self._usage)
        for field, help in _TENANT_COUNTERS.items():
            counter = CounterMetricFamily(f"jaxinfer_tenant_{field}", help, labels=["tenant"])
            for tenant, totals in usage.items():
                counter.add_metric([tenant], getattr(totals, field))
            yield counter
        requests = CounterMetricFamily("jaxinfer_tenant_requests", "Requests ended, by tenant and how", labels=["tenant", "outcome"])
        for tenant, totals in usage.items():
            for outcome in Outcome:
                requests.add_metric([tenant, outcome], totals.requests[outcome])
        yield requests


class _BuildCollector(Collector):
    """Constant 1, with the versions as labels."""

    def collect(self) -> Iterable[Metric]:
        versions = {name: metadata.version(package) for name, package in (("version", "jaxinfer"), ("jax", "jax"), ("jaxlib", "jaxlib"))}
        labels = versions | {"python": platform.python_version()}
        info = GaugeMetricFamily("jaxinfer_build_info", "Versions of what runs, as labels of a 1", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info


def _expert_metrics(loads: Mapping[str, ExpertLoad]) -> Metric:
    help = "Tokens of the busiest expert, or device with experts, as a multiple of the mean, on average over layers, or in the worst layer"
    ratio = GaugeMetricFamily("jaxinfer_expert_load_ratio", help, labels=["mesh", "of"])
    for mesh, load in loads.items():
        ratio.add_metric([mesh, "experts"], load.of_experts)
        ratio.add_metric([mesh, "experts of the worst layer"], load.most_of_experts)
        if load.of_devices is not None:
            ratio.add_metric([mesh, "devices"], load.of_devices)
    return ratio


def _tier_metrics(tiers: TierStats) -> Iterable[Metric]:
    gauges = {
        "pages": "KV pages kept below the devices",
        "bytes": "Bytes of KV pages kept below the devices",
        "size": "Bytes of KV pages that there is room for",
        "bytes_per_second": "How fast KV pages are read, as measured lately",
    }
    for field, help in gauges.items():
        gauge = GaugeMetricFamily(f"jaxinfer_kv_tier_{'size_bytes' if field == 'size' else field}", help, labels=["tier"])
        for tier in ("host", "disk"):
            gauge.add_metric([tier], getattr(tiers, f"{tier}_{field}"))
        if field == "bytes_per_second":
            gauge.add_metric(["peers"], tiers.peer_bytes_per_second)
        yield gauge
    hits = CounterMetricFamily("jaxinfer_kv_tier_hits", "KV pages fetched", labels=["tier"])
    hits.add_metric(["host"], tiers.num_host_hits)
    hits.add_metric(["disk"], tiers.num_disk_hits)
    hits.add_metric(["peers"], tiers.num_peer_hits)
    refused = CounterMetricFamily("jaxinfer_kv_tier_refused_pages", "KV pages of the file that were not believed", labels=["reason"])
    for reason, count in tiers.refused.items():
        refused.add_metric([reason], count)
    yield from (hits, refused)
    yield GaugeMetricFamily("jaxinfer_kv_tier_unsaved_pages", "KV pages that wait to be written to disk", value=tiers.num_unsaved)
    yield CounterMetricFamily(
        "jaxinfer_kv_tier_dropped_pages", "KV pages lost, for the disk was slow, full or failing", value=tiers.num_dropped
    )
    yield CounterMetricFamily("jaxinfer_kv_tier_failed_writes", "Writes to disk that failed", value=tiers.num_failed_writes)
    yield CounterMetricFamily("jaxinfer_kv_tier_written_bytes", "Bytes of KV pages written to disk", value=tiers.written_bytes)


def _histogram(name: str, help: str, histogram: Histogram) -> HistogramMetricFamily:
    counts = list(histogram.counts)
    cumulative = [sum(counts[: i + 1]) for i in range(len(counts))]
    bounds = [*(str(bound) for bound in TIME_BUCKETS), "+Inf"]
    return HistogramMetricFamily(name, help, buckets=list(zip(bounds, cumulative, strict=True)), sum_value=histogram.total)


class _ClusterCollector(Collector):
    """A router's workers."""

    def __init__(self, cluster: ClusterStats) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        for kind, named in ((GaugeMetricFamily, _WORKER_GAUGES), (CounterMetricFamily, _WORKER_COUNTERS)):
            for field, (name, help) in named.items():
                family = kind(f"jaxinfer_worker_{name}", help, labels=["worker", "role"])
                for worker in self._cluster.workers:
                    family.add_metric([worker.address, worker.role], getattr(worker, field))
                yield family
        routed = CounterMetricFamily("jaxinfer_routed_sequences", "Sequences by why they went where they went", labels=["reason"])
        for reason, count in self._cluster.num_routed.items():
            routed.add_metric([reason], count)
        yield routed
        yield CounterMetricFamily(
            "jaxinfer_migrated_sequences", "Sequences that lost their worker and went on elsewhere", value=self._cluster.num_migrations
        )


def metrics_text(
    stats: EngineStats | Mapping[str, ModelReport],
    answered: Answered,
    usage: UsageByTenant,
    batches: BatchCounts | None = None,
    cluster: ClusterStats | None = None,
) -> tuple[bytes, str]:
    """Prometheus' text format, and its content type. `stats`: of several models, a report of each by name."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(stats) if isinstance(stats, EngineStats) else _ModelsCollector(stats))
    registry.register(_ServerCollector(answered, usage, batches))
    registry.register(_BuildCollector())
    if cluster is not None:
        registry.register(_ClusterCollector(cluster))
    ProcessCollector(registry=registry)
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def live_numbers(stats: EngineStats, cluster: ClusterStats | None = None) -> dict[str, Any]:
    """What the chat page shows, as JSON: seconds, and counts since the start. The page computes rates."""
    return {
        "cluster": None if cluster is None else dataclasses.asdict(cluster),
        "output_tokens": stats.num_output_tokens,
        "prompt_tokens": stats.num_prompt_tokens,
        "cached_tokens": stats.num_cached_tokens,
        "time_to_first_token": stats.time_to_first_token.quantile(0.5),
        "inter_token_latency": stats.inter_token_latency.quantile(0.5),
        "running": stats.num_running,
        "prefilling": stats.num_prefilling,
        "waiting": stats.num_waiting,
        "pages": {mesh: [getattr(stats, f"{mesh}_pages_used"), getattr(stats, f"{mesh}_pages")] for mesh in ("prefill", "decode")},
        "devices": {"prefill": stats.prefill_devices, "decode": stats.decode_devices},
        "shares_pages": stats.prefill_devices == stats.decode_devices,
        "compilations_after_ready": stats.num_compilations_after_ready,
        "preemptions": stats.num_preemptions,
        "targets": {name: {"seconds": target, "met": share} for name, (target, share) in stats.targets().items()},
    }
