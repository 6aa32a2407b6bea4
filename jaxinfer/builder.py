"""From a configuration to workers that are ready: weights are read while programs compile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from checkpoints.digest import weights_digest
from checkpoints.hub import open_source, resolve
from checkpoints.source import TensorSource
from jaxinfer.checkpoint_check import check_tensors
from jaxinfer.config import ConfigError, EngineConfig, ScheduleConfig, parse_bytes, parse_disk
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.decode.scheduler import DecodeScheduler
from jaxinfer.decode.worker import DecodeWorker
from jaxinfer.encode.loading import load_encoder
from jaxinfer.encode.worker import EncodeWorker
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.kv_tiers.tiers import Tiers
from jaxinfer.kv_transfer.cross_mesh import CrossMeshTransfer, MeshPageTransport, PageTransport
from jaxinfer.kv_transfer.handoff import KVTransfer
from jaxinfer.kv_transfer.page_moves import PageMover, gather_programs, scatter_programs
from jaxinfer.kv_transfer.same_mesh import SameMeshTransfer
from jaxinfer.kv_transfer.stage_moves import StagePageTransport, routes
from jaxinfer.kv_transfer.tiers import TierTransfer
from jaxinfer.models.registry import config_of
from jaxinfer.multi_process.processes import Processes, SingleProcess, lead
from jaxinfer.plan import Plan, RolePlan, make_plan
from jaxinfer.prefill.chunk_size import ChunkSizeController
from jaxinfer.prefill.queue import WaitingQueue
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.prefill.scheduler import PrefillScheduler
from jaxinfer.prefill.worker import PrefillWorker
from jaxinfer.runtime.compilation import COUNTER, compile_programs, use_persistent_cache
from jaxinfer.runtime.device_clock import DeviceClock
from jaxinfer.runtime.expert_loads import ExpertLoads
from jaxinfer.runtime.load import load_weights, random_weights
from jaxinfer.runtime.profile import named
from jaxinfer.runtime.stage import Stage, StagedWeights
from jaxinfer.runtime.stage_clock import StageClock
from jaxinfer.sampling_defaults import describe, read_sampling_defaults
from jaxinfer.start_report import mesh_names, report_start
from jaxinfer.stats import EngineStats, ExpertLoad
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.warmup import measure, warm_up
from pallas_kernels.span import FULL_ATTENTION

_FETCHED_SHARE = 4  # of host memory for pages one part is for those on their way up


@dataclass(frozen=True)
class EngineComponents:
    """What an engine drives."""

    config: EngineConfig
    plan: Plan
    tokenizer: Tokenizer
    prefill: PrefillWorker
    decode: DecodeWorker
    transfer: KVTransfer
    prefill_manager: KVManager
    decode_manager: KVManager  # the same as prefill's when both share a mesh
    weights: StagedWeights  # decode's
    tiers: TierTransfer | None = None
    encode: EncodeWorker | None = None  # on the prefill mesh
    processes: Processes = field(default_factory=SingleProcess)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # of `SamplingParams`, by name


def build(config: EngineConfig, stats: EngineStats, processes: Processes | None = None) -> EngineComponents:
    """Load and compile everything; after it nothing compiles. Without `processes` it is the first of as many as are configured.

    Raises `ConfigError`, `CheckpointError` or `UnsupportedModelError` with what to change.
    """
    use_persistent_cache()
    split_cpu(config.devices.cpu_devices)
    processes = processes or lead(config)
    try:
        return _build(config, stats, processes)
    except BaseException:
        processes.close()
        raise


def _build(config: EngineConfig, stats: EngineStats, processes: Processes) -> EngineComponents:
    clocks = [DeviceClock(), DeviceClock()]
    # First, so that the plan's pages are of the memory that it leaves.
    encode = load_encoder(config, stats, clocks[0]) if config.model.embedding_model else None
    path = resolve(config.model.model)
    source = open_source(path)
    sampling_defaults = read_sampling_defaults(config.model.model, path, config.model.generation_config)
    stats.sampling_defaults = describe(sampling_defaults)
    stats.start.note("laying out the model")
    architecture = config_of(source)
    plan = make_plan(config, architecture, source)
    for role in (plan.prefill, plan.decode):
        for stage in role.stages:
            processes.check(f"{role.role}_devices", stage.mesh)
    tokenizer = Tokenizer.from_source(source)
    spec, schedule = plan.page_spec, config.schedule
    if plan.has_stages and not config.model.random_weights:
        check_tensors(source, architecture)  # a stage knows nothing of the others' tensors

    roles = (plan.decode,) if plan.shares_mesh else (plan.prefill, plan.decode)
    pools = [_pools(plan, role) for role in roles]  # of each stage
    prefill_stages, decode_stages = _stages(plan.prefill, pools[0], config), _stages(plan.decode, pools[-1], config)
    cache, clocks = config.cache, clocks[: len(roles)]
    managers = [
        KVManager(
            spec,
            role.num_pages,
            prefix_cache=cache.prefix_cache,
            session_seconds=cache.session_seconds,
            chunk_size=schedule.prefill_buckets[-1],
        )
        for role in roles
    ]
    stage_clocks = [StageClock(role.layout.pp) if role.layout.pp > 1 else None for role in roles]
    prefill_runner = PrefillRunner(prefill_stages, schedule.prefill_buckets, plan.max_model_len, stage_clocks[0])
    decode_runner = DecodeRunner(decode_stages, of_lanes(schedule, plan.decode.layout.pp), plan.max_model_len, stage_clocks[-1])
    sources = prefill_runner.programs() + decode_runner.programs()
    tiers = _tiers(config, plan, source)
    of_stages = _stage_moves(plan, pools) if not plan.shares_mesh and plan.has_stages else None
    if of_stages is not None:
        sources += [program for moves in of_stages for program in moves.programs()]
    elif not plan.shares_mesh or tiers is not None:
        for role, (pool,) in zip(roles, pools, strict=True):
            sources += gather_programs(_moves(role), pool) + scatter_programs(_moves(role), pool)
    with ThreadPoolExecutor(1, "weights") as background:
        started = time.monotonic()
        loading = background.submit(_load, config, plan, source, pools, stats)
        with stats.start.counted("compiling", len(sources)) as compiled:
            programs = compile_programs(sources, compiled)
        stats.compile_seconds += time.monotonic() - started
        prefill_weights, decode_weights = loading.result()
    report_start(stats, config, plan, programs, pools)
    if config.devices.profile is not None:
        programs = named(programs)
    prefill_runner, decode_runner = processes.share("prefill", prefill_runner), processes.share("decode", decode_runner)
    movers = [
        processes.share(_moves(role), PageMover(_moves(role), of_role[0], programs))
        for role, of_role in zip(roles, pools, strict=True)
        if not plan.has_stages
    ]
    chunk_controller = ChunkSizeController(
        schedule.prefill_buckets, schedule.target_ttft, schedule.target_itl, delays_decode=plan.shares_mesh
    )
    transfer: KVTransfer = SameMeshTransfer()
    cross_mesh: CrossMeshTransfer | None = None
    processes.compiled(_summary(plan))
    with COUNTER.compiling():  # what allocating and moving compile is wanted
        prefill_runner.start(programs, prefill_weights)
        decode_runner.start(programs, decode_weights)
        warm_up(prefill_runner, decode_runner, stats.start)
        stats.start.note("measuring")
        for name, clock in zip(mesh_names(plan), stage_clocks, strict=True):
            if clock is not None:
                clock.begin()
                stats.stage_times[name] = clock.times
        if chunk_controller.steers or tiers is not None:
            measure(prefill_runner, chunk_controller)
        if not plan.shares_mesh:
            ways: Sequence[PageTransport]
            if of_stages is None:
                ways = [MeshPageTransport(movers[0], movers[1]), MeshPageTransport(movers[1], movers[0])]
            else:
                for moves in of_stages:
                    moves.start(programs)
                ways = [processes.share(f"page moves {number}", moves) for number, moves in enumerate(of_stages)]
            transfer = cross_mesh = CrossMeshTransfer(ways[0], ways[1], managers[0], managers[1])
            cross_mesh.warm_up()
    _watch_experts(stats, {"prefill": prefill_runner.loads, "decode": decode_runner.loads})
    queue = WaitingQueue(schedule.ageing_seconds, quantum=schedule.prefill_chunk_size)
    prefill_scheduler = PrefillScheduler(managers[0], queue, schedule.prefill_buckets)
    prefill_scheduler.copy_pages = prefill_runner.copy_pages
    if cross_mesh is not None:
        prefill_scheduler.recall = cross_mesh.recall
    tier_transfer: TierTransfer | None = None
    if tiers is not None:
        tier_transfer = TierTransfer(
            tiers, list(zip(movers, managers, strict=True)), chunk_controller.seconds_to_compute, _most_fetched(config, plan)
        )
        prefill_scheduler.tiers = tier_transfer
        stats.read_tiers = tiers.stats
        with COUNTER.compiling():
            tier_transfer.warm_up()
    processes.wait_until_built()
    return EngineComponents(
        config,
        plan,
        tokenizer,
        PrefillWorker(prefill_scheduler, prefill_runner, clocks[0], chunk_controller),
        DecodeWorker(DecodeScheduler(managers[-1], decode_runner.num_slots, decode_runner.num_lanes), decode_runner, clocks[-1]),
        transfer,
        managers[0],
        managers[-1],
        decode_weights,
        tier_transfer,
        encode,
        processes,
        sampling_defaults,
    )


def split_cpu(num_devices: int | None) -> None:
    """Have JAX see this many CPU devices. Raises `ConfigError` if JAX has started with another number already."""
    if num_devices is None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        available = len(jax.devices("cpu"))
        if available < num_devices:
            raise ConfigError(
                f"cpu_devices is {num_devices}, but JAX has started with {available}: set it before anything uses JAX"
            ) from error


def of_lanes(schedule: ScheduleConfig, num_lanes: int) -> tuple[int, ...]:
    """Batch sizes of decode programs where as many lanes share the sequences."""
    most = -(-schedule.max_batch_size // num_lanes)
    return tuple(sorted({min(size, most) for size in schedule.decode_buckets}))


def _pools(plan: Plan, role: RolePlan) -> list[PagePool]:
    spec, dtype = plan.page_spec, plan.template.activation_dtype
    return [
        PagePool(spec, role.num_pages, dtype, stage.mesh, role.rules, stage.template.heads, stage.template.layers_of_group)
        for stage in role.stages
    ]


def _stage_moves(plan: Plan, pools: list[list[PagePool]]) -> list[StagePageTransport]:
    """From prefill's pools to decode's, and back."""
    groups = LayerGroups.of(plan.template.layer_spans)
    prefill, decode = ([stage.template.layers for stage in role.stages] for role in (plan.prefill, plan.decode))
    there = StagePageTransport("prefill to decode", routes(groups, prefill, decode), pools[0], pools[1])
    return [there, StagePageTransport("decode to prefill", routes(groups, decode, prefill), pools[1], pools[0])]


def _summary(plan: Plan) -> str:
    """Text that differs where the programs or arrays of two plans do."""
    return repr(
        [
            plan.template.config,
            str(plan.template.form),
            plan.max_model_len,
            *((r.role, str(r.layout), r.num_pages) for r in (plan.prefill, plan.decode)),
        ]
    )


def _stages(role: RolePlan, pools: list[PagePool], config: EngineConfig) -> list[Stage]:
    return [
        Stage(stage.template, stage.mesh, role.rules, pool, role.attention, config.devices.sequence_parallel)
        for stage, pool in zip(role.stages, pools, strict=True)
    ]


def _tiers(config: EngineConfig, plan: Plan, source: TensorSource) -> Tiers | None:
    cache, page_bytes = config.cache, plan.page_spec.page_bytes
    host_size = parse_bytes("kv_host_memory", cache.kv_host_memory or "0")
    if not host_size:
        return None
    if host_size >= 2 * page_bytes:
        host_size -= _most_fetched(config, plan) * page_bytes
    if plan.has_stages:
        raise ConfigError("kv_host_memory is given, but pages of a pipeline's stages can't be kept there yet: leave it out, or use pp=1")
    if plan.page_spec.spans != (FULL_ATTENTION,):
        raise ConfigError(
            "kv_host_memory is given, but this model has layers of bounded spans, whose pages can't be kept there yet: leave it out"
        )
    disk = parse_disk("kv_disk", cache.kv_disk) if cache.kv_disk else None
    return Tiers(page_bytes, host_size, disk, _fingerprint(config, plan, source) if disk else b"")


def _watch_experts(stats: EngineStats, loads: Mapping[str, ExpertLoads]) -> None:
    """From now on: warming up sends all tokens the same way."""
    for of_role in loads.values():
        of_role.reset()

    def read() -> dict[str, ExpertLoad]:
        found = {role: of_role.read() for role, of_role in loads.items()}
        return {role: load for role, load in found.items() if load is not None}

    if any(abstract is not None for of_role in loads.values() for abstract in of_role.abstract):
        stats.read_expert_loads = read


def _most_fetched(config: EngineConfig, plan: Plan) -> int:
    """Pages that host memory has room for on their way up."""
    num_pages = parse_bytes("kv_host_memory", config.cache.kv_host_memory or "0") // plan.page_spec.page_bytes
    return max(1, num_pages // _FETCHED_SHARE)


def _fingerprint(config: EngineConfig, plan: Plan, source: TensorSource) -> bytes:
    """All that decides what a page's bytes mean but the tokens: the model's shapes and weights, types and layout."""
    template = plan.template
    about = (template.config, str(template.form), str(template.activation_dtype), plan.page_spec)
    return repr(about).encode() + (b"random weights" if config.model.random_weights else weights_digest(source.path))


def _load(
    config: EngineConfig, plan: Plan, source: TensorSource, pools: list[list[PagePool]], stats: EngineStats
) -> tuple[StagedWeights, StagedWeights]:
    started = time.monotonic()

    def of(role: RolePlan) -> StagedWeights:
        if config.model.random_weights:
            return tuple(random_weights(stage.template, stage.mesh, role.rules) for stage in role.stages)
        return tuple(load_weights(stage.template, source, stage.mesh, role.rules) for stage in role.stages)

    num_bytes = 0 if config.model.random_weights else sum(source.stored(name).num_bytes for name in source.names())
    num_bytes *= 1 if plan.shares_mesh else 2
    with COUNTER.compiling(), stats.start.measured("loading weights", num_bytes, lambda: source.bytes_read):
        decode = of(plan.decode)
        prefill = decode if plan.shares_mesh else of(plan.prefill)
        for of_role in pools:
            for pool in of_role:
                pool.allocate()
        jax.block_until_ready((decode, prefill, [pool.array for of_role in pools for pool in of_role]))
    stats.load_seconds += time.monotonic() - started
    return prefill, decode


def _moves(role: RolePlan) -> str:
    """What the programs that move pages out of and into a mesh's pool are called."""
    return f"{role.role} pages"
