"""What a router knows of its workers, for metrics, the page and `jaxinfer top`. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """By a worker's own word, at most a second old; `num_cached_blocks` by what it told of its prefix cache."""

    worker_id: str
    role: str
    address: str
    num_waiting: int
    num_prefilling: int
    num_running: int
    num_incoming: int  # that other workers prefill for it
    num_pending_tokens: int  # of prompts, to compute
    num_used_pages: int
    num_free_pages: int
    num_kept_handoffs: int  # whose pages wait on its host for others
    num_cached_blocks: int
    num_pages_received: int
    num_output_tokens: int
    num_new_prompt_tokens: int  # of its requests, without those that were cached
    max_batch_size: int
    num_bytes_pulled: int  # of pages, from other workers
    num_wire_bytes_pulled: int  # that these were on the wire
    pull_seconds: float  # that these took
    prefill_tokens_per_second: float
    pull_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """`num_routed`: sequences by why they went where they went; `num_migrations`: those that lost a worker."""

    workers: tuple[WorkerStats, ...]
    num_migrations: int
    num_routed: Mapping[str, int]
