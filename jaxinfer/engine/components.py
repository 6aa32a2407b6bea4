"""EngineComponents: what an engine drives; `build_roles`: both roles over whatever runs their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.decode.role import DecodeRole
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.decode.scheduler import DecodeScheduler
from jaxinfer.decode.worker import DecodeWorker
from jaxinfer.encode.worker import EncodeWorker
from jaxinfer.engine.later_programs import LaterPrograms
from jaxinfer.engine.served_weights import ServedWeights
from jaxinfer.engine.structured_sampling import StructuredSampling
from jaxinfer.kv_cache.events import CacheEvents
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_tiers.tiers import Tiers
from jaxinfer.kv_transfer.cross_mesh import CrossMeshTransfer, PrefixRecall
from jaxinfer.kv_transfer.handoff import KVTransfer
from jaxinfer.kv_transfer.page_moves import HostPageMover
from jaxinfer.kv_transfer.page_transport import PageCopier, PageTransport
from jaxinfer.kv_transfer.same_mesh import SameMeshTransfer
from jaxinfer.kv_transfer.tiers import TierTransfer
from jaxinfer.multi_process.processes import Processes, SingleProcess
from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.planner.engine_plan import Plan
from jaxinfer.prefill.chunk_size import ChunkSizeController
from jaxinfer.prefill.queue import WaitingQueue
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.prefill.scheduler import PrefillScheduler
from jaxinfer.prefill.worker import PrefillWorker
from jaxinfer.structured.grammars import Grammars
from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineComponents:
    config: EngineConfig
    plan: Plan
    tokenizer: Tokenizer
    prefill: PrefillRole
    decode: DecodeRole
    weights: ServedWeights
    encode: EncodeWorker | None = None  # on the prefill mesh
    processes: Processes = field(default_factory=SingleProcess)
    later: LaterPrograms = field(default_factory=lambda: LaterPrograms(()))
    structured: StructuredSampling | None = None  # None: no structured outputs
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # of `SamplingParams`, by name
    clock: Callable[[], float] = time.monotonic  # seconds

    @property
    def grammars(self) -> Grammars | None:
        return None if self.structured is None else self.structured.grammars

    def stop_compiling(self) -> None:
        """Compile no more in the background."""
        self.later.stop()
        if self.structured is not None:
            self.structured.stop()


@dataclass(frozen=True)
class Runners:
    """The device half of both roles: compiled programs and their arrays, or the fake device of the tests.

    `clocks`, `movers`: one a mesh, prefill's first. `movers` copy pages between a role's pools and the host, where
    tiers or other engines have use for that. `forward`, `reverse`: transports of pages from prefill's pool to decode's
    and back; None where both roles share a pool."""

    prefill: PrefillRunner
    decode: DecodeRunner
    clocks: Sequence[DeviceClock]
    movers: Sequence[HostPageMover] = ()
    forward: PageTransport | None = None
    reverse: PageTransport | None = None


@dataclass(frozen=True)
class TierSettings:
    """KV tiers below the device's pages. `seconds_to_compute(num_tokens)`: how long prefill would take instead."""

    tiers: Tiers
    seconds_to_compute: Callable[[int], float]
    most_fetched: int  # pages on their way up at once


def build_roles(
    config: EngineConfig,
    spec: PageSpec,
    num_pages: Sequence[int],
    runners: Runners,
    chunk_controller: ChunkSizeController,
    tiers: TierSettings | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[PrefillRole, DecodeRole]:
    """Both roles over these runners. `num_pages`: of each pool, prefill's first; a single one is shared."""
    cache, schedule, buckets = config.cache, config.schedule, config.schedule.prefill_buckets
    managers = [
        KVManager(
            spec,
            size,
            prefix_cache=cache.prefix_cache,
            session_seconds=cache.session_seconds,
            chunk_size=buckets[-1],
            clock=clock,
            events=CacheEvents() if cache.kv_peers and cache.prefix_cache else None,
        )
        for size in num_pages
    ]
    decode_scheduler = DecodeScheduler(managers[-1], runners.decode.num_slots, runners.decode.num_micro_batches)
    decode = DecodeRole(
        managers[-1],
        decode_scheduler,
        DecodeWorker(decode_scheduler, runners.decode, runners.clocks[-1]),
        _transfer(managers[-1], runners.forward),
        runners.movers[-1] if runners.movers else None,
    )
    queue = WaitingQueue(schedule.ageing_seconds, schedule.prefill_chunk_size, clock)
    prefill_scheduler = PrefillScheduler(managers[0], queue, runners.prefill.buckets)
    prefill_scheduler.copy_pages = runners.prefill.copy_pages
    prefill = PrefillRole(
        managers[0],
        prefill_scheduler,
        PrefillWorker(prefill_scheduler, runners.prefill, runners.clocks[0], chunk_controller),
        schedule.prefill_chunk_size,
        _tier_transfer(tiers, runners, managers),
        None if runners.reverse is None else PrefixRecall(decode, managers[0], PageCopier(runners.reverse, spec.num_groups)),
        runners.movers[0] if runners.movers else None,
    )
    return prefill, decode


def _transfer(manager: KVManager, forward: PageTransport | None) -> KVTransfer:
    if forward is None:
        return SameMeshTransfer(manager)
    return CrossMeshTransfer(manager, PageCopier(forward, manager.spec.num_groups))


def _tier_transfer(tiers: TierSettings | None, runners: Runners, managers: Sequence[KVManager]) -> TierTransfer | None:
    if tiers is None:
        return None
    pools = list(zip(runners.movers, managers, strict=True))
    return TierTransfer(tiers.tiers, pools, tiers.seconds_to_compute, tiers.most_fetched)
