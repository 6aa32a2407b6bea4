"""`build`: from a configuration to roles that are ready; weights are read while programs compile."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax

from checkpoints.digest import weights_digest
from checkpoints.hub import open_source, resolve
from checkpoints.source import TensorSource
from jaxinfer.config import ConfigError, EngineConfig, ScheduleConfig, parse_bytes, parse_disk
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.encode.loading import load_encoder
from jaxinfer.engine.components import EngineComponents, Runners, TierSettings, build_roles
from jaxinfer.engine.kv_scales import CalibratedScales
from jaxinfer.engine.later_programs import LaterBucket, LaterPrograms
from jaxinfer.engine.served_weights import ServedWeights
from jaxinfer.engine.shipped_programs import install_programs
from jaxinfer.engine.start_report import mesh_names, report_start
from jaxinfer.engine.structured_sampling import StructuredSampling
from jaxinfer.engine.warmup import measure, warm_up
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.kv_tiers.tiers import Tiers
from jaxinfer.kv_transfer.page_moves import HostPageMover, PageMover, gather_programs, scatter_programs
from jaxinfer.kv_transfer.page_transport import MeshPageTransport, PageTransport
from jaxinfer.kv_transfer.page_transport import warm_up as warm_up_transport
from jaxinfer.kv_transfer.stage_moves import StagePageTransport, routes
from jaxinfer.kv_transfer.staged_pages import StagedPageMover
from jaxinfer.models.registry import config_of
from jaxinfer.multi_process.processes import Processes, lead
from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.pipeline.expert_loads import ExpertLoads
from jaxinfer.pipeline.stage_clock import StageClock
from jaxinfer.planner.engine_plan import Plan, RolePlan, make_plan
from jaxinfer.prefill.chunk_size import ChunkSizeController
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.programs.compilation import COUNTER, ProgramSource, compile_programs, use_persistent_cache, use_portable_keys
from jaxinfer.programs.profile import named
from jaxinfer.sampling_defaults import describe, read_sampling_defaults
from jaxinfer.stats import EngineStats, ExpertLoad
from jaxinfer.structured.grammars import Grammars
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.weights.formats.weight_format import MatrixAxes, MisfitError
from jaxinfer.weights.load import check_tensors
from pallas_kernels.span import FULL_ATTENTION

logger = logging.getLogger(__name__)

_FETCHED_SHARE = 4  # one part in so many of the host memory for pages is for pages being fetched
_FETCHED_BYTES = 256 << 20  # for pages being fetched from other engines where there is no such memory


def build(config: EngineConfig, stats: EngineStats, processes: Processes | None = None) -> EngineComponents:
    """Load weights and compile every program; nothing compiles afterwards. Without `processes`, this process is the
    first of those that are configured.

    Raises `ConfigError`, `CheckpointError` or `UnsupportedModelError`, which say what to change.
    """
    use_persistent_cache()
    split_cpu(config.devices.cpu_devices)
    processes = processes or lead(config)
    use_portable_keys()
    install_programs(config)
    incompressible: frozenset[MatrixAxes] = frozenset()
    try:
        while True:
            try:
                return _build(config, stats, processes, incompressible)
            except MisfitError as error:  # so rare that no start reads all weights beforehand to know
                logger.warning("%s: starting anew with what has these shapes uncompressed", error)
                incompressible |= error.matrices
    except BaseException:
        processes.close()
        raise


def _build(config: EngineConfig, stats: EngineStats, processes: Processes, incompressible: frozenset[MatrixAxes]) -> EngineComponents:
    clocks = [DeviceClock(), DeviceClock()]
    # First, so that the plan's KV budget excludes the encoder's memory.
    encode = load_encoder(config, stats, clocks[0]) if config.model.embedding_model else None
    path = resolve(config.model.model)
    source = open_source(path)
    sampling_defaults = read_sampling_defaults(config.model.model, path, config.model.generation_config)
    stats.sampling_defaults = describe(sampling_defaults)
    stats.start.note("placing the model")
    architecture = config_of(source)
    plan = make_plan(config, architecture, source, incompressible)
    for role in (plan.prefill, plan.decode):
        for stage in role.stages:
            processes.check(f"{role.role}_devices", stage.mesh)
    tokenizer = Tokenizer.from_source(source)
    schedule = config.schedule
    if plan.has_stages and not config.model.random_weights:
        check_tensors(plan.template, source)  # loading a stage doesn't see the other stages' tensors

    if schedule.ready_when == "first" and config.devices.num_processes > 1:
        raise ConfigError("ready_when is first, but an engine of several processes needs all programs at once: use all")
    roles = (plan.decode,) if plan.shares_mesh else (plan.prefill, plan.decode)
    pools = [role.pools() for role in roles]  # one a stage
    sequence_parallel = config.devices.sequence_parallel
    prefill_stages = plan.prefill.stages_with(pools[0], sequence_parallel)
    decode_stages = plan.decode.stages_with(pools[-1], sequence_parallel)
    stage_clocks = [StageClock(role.layout.pp) if role.layout.pp > 1 else None for role in roles]
    buckets = schedule.prefill_buckets, micro_batch_buckets(schedule, plan.decode.layout.pp)
    first = buckets if schedule.ready_when == "all" else tuple(sizes[-1:] for sizes in buckets)
    grammars = Grammars(tokenizer, plan.template.config.vocab_size)
    prefill_runner = PrefillRunner(prefill_stages, first[0], plan.max_model_len, stage_clocks[0], grammars.mask_words)
    decode_runner = DecodeRunner(decode_stages, first[1], plan.max_model_len, stage_clocks[-1], grammars.mask_words)
    sources = prefill_runner.programs() + decode_runner.programs()
    tiers = _tiers(config, plan, source)
    stage_transports = _stage_transports(plan, pools) if not plan.shares_mesh and plan.has_stages else None
    if stage_transports is not None:
        sources += [program for transport in stage_transports for program in transport.programs()]
    moves_pages = tiers is not None or config.cache.kv_peers or not (plan.shares_mesh or plan.has_stages)
    if moves_pages:
        for name, pool in _named_pools(roles, pools):
            sources += gather_programs(name, pool) + scatter_programs(name, pool)
    weights = ServedWeights(config, plan, source, pools, stats, incompressible)
    with ThreadPoolExecutor(1, "weights") as background:
        started = time.monotonic()
        loading = background.submit(weights.load)
        with stats.start.counted("compiling", len(sources)) as compiled:
            programs = compile_programs(sources, compiled)
        stats.compile_seconds += time.monotonic() - started
        loading.result()
    report_start(stats, config, plan, programs, pools)
    later_prefill, later_decode = _later_sources(prefill_runner, buckets[0], sources), _later_sources(decode_runner, buckets[1], sources)
    if config.devices.profile is not None:
        programs = named(programs)
    structured = None
    if schedule.structured_outputs and config.devices.num_processes == 1:
        masked = prefill_runner.masked_programs(buckets[0]) + decode_runner.masked_programs(buckets[1])
        structured = StructuredSampling(
            grammars, (prefill_runner, decode_runner), masked, named if config.devices.profile is not None else dict
        )
    prefill_runner, decode_runner = processes.share("prefill", prefill_runner), processes.share("decode", decode_runner)
    page_movers = {name: processes.share(name, PageMover(name, pool, programs)) for name, pool in _named_pools(roles, pools)}
    movers = [_host_mover(plan, role, page_movers) for role in roles] if moves_pages else []
    chunk_controller = ChunkSizeController(
        schedule.prefill_buckets, schedule.target_ttft, schedule.target_itl, delays_decode=plan.shares_mesh
    )
    transports: Sequence[PageTransport] = ()  # forward, reverse
    processes.compiled(_summary(plan))
    with COUNTER.compiling():  # allocating and moving pages compiles too
        prefill_runner.start(programs, weights.prefill)
        decode_runner.start(programs, weights.decode)
        if plan.page_spec.is_float8:
            stats.start.note("finding the scales of keys and values")
            kv_scales = CalibratedScales(
                plan.template, tokenizer, prefill_runner, prefill_stages, decode_stages, partial(setattr, stats, "kv_dtype")
            )
            weights.scale_pages(kv_scales)
        warm_up(prefill_runner, decode_runner, stats.start)
        stats.start.note("measuring")
        for name, clock in zip(mesh_names(plan), stage_clocks, strict=True):
            if clock is not None:
                clock.begin()
                stats.stage_times[name] = clock.times
        if chunk_controller.steers or tiers is not None:
            measure(prefill_runner, chunk_controller)
        if not plan.shares_mesh:
            if stage_transports is None:
                there, here = page_movers.values()
                transports = [MeshPageTransport(there, here), MeshPageTransport(here, there)]
            else:
                for stage_transport in stage_transports:
                    stage_transport.start(programs)
                transports = [processes.share(f"page moves {n}", transport) for n, transport in enumerate(stage_transports)]
            for transport in transports:
                warm_up_transport(transport)
        if config.cache.kv_peers:
            for mover in movers:
                mover.warm_up()
    _watch_experts(stats, {"prefill": prefill_runner.loads, "decode": decode_runner.loads})
    forward, reverse = transports or (None, None)
    runners = Runners(prefill_runner, decode_runner, clocks[: len(roles)], movers, forward, reverse)
    below = None if tiers is None else TierSettings(tiers, chunk_controller.seconds_to_compute, _most_fetched(config, plan))
    prefill, decode = build_roles(config, plan.page_spec, [role.num_pages for role in roles], runners, chunk_controller, below)
    if prefill.tiers is not None:
        stats.read_tiers = prefill.tiers.tiers.stats
        with COUNTER.compiling():
            prefill.tiers.warm_up()
    weights.start(prefill_runner, decode_runner)
    processes.wait_until_built()
    later_buckets = [LaterBucket(decode, *one) for one in later_decode] + [LaterBucket(prefill, *one) for one in later_prefill]
    later = LaterPrograms(later_buckets, named if config.devices.profile is not None else dict)
    later.start()
    return EngineComponents(config, plan, tokenizer, prefill, decode, weights, encode, processes, later, structured, sampling_defaults)


def _later_sources(
    runner: PrefillRunner | DecodeRunner, buckets: Sequence[int], sources: Sequence[ProgramSource]
) -> list[tuple[int, list[ProgramSource]]]:
    """Of each bucket that a runner has not, the smallest first, the programs that neither it nor those before it
    have."""
    known, found = {source.name for source in sources}, []
    for size in buckets:
        if size not in runner.buckets:
            new = [source for source in runner.programs((size,)) if source.name not in known]
            known |= {source.name for source in new}
            found.append((size, new))
    return found


def split_cpu(num_devices: int | None) -> None:
    """Set JAX's number of CPU devices. Raises `ConfigError` if JAX has started with another number already."""
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


def micro_batch_buckets(schedule: ScheduleConfig, num_micro_batches: int) -> tuple[int, ...]:
    """Batch sizes of decode programs where this many micro-batches share the sequences."""
    most = -(-schedule.max_batch_size // num_micro_batches)
    return tuple(sorted({min(size, most) for size in schedule.decode_buckets}))


def _stage_transports(plan: Plan, pools: list[list[PagePool]]) -> list[StagePageTransport]:
    """Transports from prefill's pools to decode's, and in reverse."""
    groups = LayerGroups.of(plan.template.layer_spans)
    prefill, decode = ([stage.template.layers for stage in role.stages] for role in (plan.prefill, plan.decode))
    forward = StagePageTransport("prefill to decode", routes(groups, prefill, decode), pools[0], pools[1])
    return [forward, StagePageTransport("decode to prefill", routes(groups, decode, prefill), pools[1], pools[0])]


def _summary(plan: Plan) -> str:
    """Text by which processes check that they have planned the same programs and arrays."""
    return repr(
        [
            plan.template.config,
            str(plan.template.weight_format),
            plan.max_model_len,
            *((r.role, str(r.layout), r.num_pages) for r in (plan.prefill, plan.decode)),
        ]
    )


def _tiers(config: EngineConfig, plan: Plan, source: TensorSource) -> Tiers | None:
    cache, page_bytes = config.cache, plan.page_spec.page_bytes
    host_size = parse_bytes("kv_host_memory", cache.kv_host_memory or "0")
    has_peers = cache.kv_peers and cache.prefix_cache and plan.page_spec.spans == (FULL_ATTENTION,)
    if not host_size and not has_peers:
        return None
    if host_size >= 2 * page_bytes:
        host_size -= _most_fetched(config, plan) * page_bytes
    if plan.page_spec.spans != (FULL_ATTENTION,):
        raise ConfigError(
            "kv_host_memory is given, but this model has layers with windows or chunks, whose pages can't be stored there yet: leave it out"
        )
    disk = parse_disk("kv_disk", cache.kv_disk) if cache.kv_disk else None
    return Tiers(page_bytes, host_size, disk, _fingerprint(config, plan, source) if disk else b"")


def _watch_experts(stats: EngineStats, loads: Mapping[str, ExpertLoads]) -> None:
    """Count experts' loads from now on: warm-up sent all tokens the same way."""
    for role_loads in loads.values():
        role_loads.reset()

    def read() -> dict[str, ExpertLoad]:
        found = {role: role_loads.read() for role, role_loads in loads.items()}
        return {role: load for role, load in found.items() if load is not None}

    if any(abstract is not None for role_loads in loads.values() for abstract in role_loads.abstract):
        stats.read_expert_loads = read


def _most_fetched(config: EngineConfig, plan: Plan) -> int:
    """The number of pages that may be on their way from the tiers at once."""
    if config.cache.kv_host_memory is None:
        return max(1, _FETCHED_BYTES // plan.page_spec.page_bytes)
    num_pages = parse_bytes("kv_host_memory", config.cache.kv_host_memory or "0") // plan.page_spec.page_bytes
    return max(1, num_pages // _FETCHED_SHARE)


def _fingerprint(config: EngineConfig, plan: Plan, source: TensorSource) -> bytes:
    """All that the meaning of a page's bytes depends on besides tokens: model shapes, weights, types, layout."""
    template = plan.template
    about = (template.config, str(template.weight_format), str(template.activation_dtype), plan.page_spec)
    return repr(about).encode() + (b"random weights" if config.model.random_weights else weights_digest(source.path))


def _named_pools(roles: Sequence[RolePlan], pools: Sequence[Sequence[PagePool]]) -> list[tuple[str, PagePool]]:
    """Each stage's pool, by the name of the programs that gather and scatter its pages."""
    return [(_mover_name(role, stage), pool) for role, of_role in zip(roles, pools, strict=True) for stage, pool in enumerate(of_role)]


def _mover_name(role: RolePlan, stage: int) -> str:
    return f"{role.role} pages" if role.layout.pp == 1 else f"{role.role} pages, stage {stage + 1}"


def _host_mover(plan: Plan, role: RolePlan, movers: Mapping[str, PageMover]) -> HostPageMover:
    """Of a role's pages, with the layers of all its stages."""
    of_stages = [movers[_mover_name(role, stage)] for stage in range(role.layout.pp)]
    if len(of_stages) == 1:
        return of_stages[0]
    return StagedPageMover(of_stages, LayerGroups.of(plan.template.layer_spans), [stage.template.layers for stage in role.stages])
