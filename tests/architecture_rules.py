"""The rules of the house as functions over source text: each takes modules and returns what breaks it, a line a breach."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import permutations
from pathlib import Path, PurePosixPath

PACKAGES = ("jaxinfer", "pallas_kernels", "sharding", "checkpoints", "server")

# importer -> what it may import of the other packages, as module prefixes
ARROWS: dict[str, tuple[str, ...]] = {
    "pallas_kernels": (),
    "sharding": (),
    "checkpoints": (),
    "jaxinfer": ("pallas_kernels", "sharding", "checkpoints"),
    "server": ("jaxinfer",),
    "server.cli": ("jaxinfer", "checkpoints", "sharding.layout"),  # `jaxinfer convert` and the default model's fetch
    "server.inspection": ("jaxinfer", "checkpoints"),  # `jaxinfer inspect`
}

# jaxinfer from top to bottom: a module imports from its own layer or lower ones.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("jaxinfer", "jaxinfer.llm", "jaxinfer.async_llm", "jaxinfer.generation"),
    (
        "jaxinfer.engine",
        "jaxinfer.engine_access",
        "jaxinfer.engine_loop",
        "jaxinfer.engine_thread",
        "jaxinfer.listeners",
        "jaxinfer.async_requests",
        "jaxinfer.embedder",
        "jaxinfer.sampling_defaults",
        "jaxinfer.checkpoint_check",
        "jaxinfer.local_checkpoint",
        "jaxinfer.reference_forward",
        "jaxinfer.multi_process",
    ),
    ("jaxinfer.planner",),
    ("jaxinfer.prefill", "jaxinfer.decode", "jaxinfer.encode", "jaxinfer.kv_transfer"),
    ("jaxinfer.sampling", "jaxinfer.pipeline", "jaxinfer.structured.mask"),
    ("jaxinfer.programs", "jaxinfer.weights"),
    ("jaxinfer.models",),
    ("jaxinfer.layers", "jaxinfer.weights.formats"),
    ("jaxinfer.kv_cache", "jaxinfer.kv_tiers"),
    (
        "jaxinfer.architecture",
        "jaxinfer.sequence",
        "jaxinfer.request",
        "jaxinfer.prompts",
        "jaxinfer.segments",
        "jaxinfer.token_ids",
        "jaxinfer.conversation",
        "jaxinfer.config",
        "jaxinfer.stats",
        "jaxinfer.start_progress",
        "jaxinfer.tokenizer",
        "jaxinfer.structured",
    ),
)
TWINS = tuple(permutations(("jaxinfer.prefill", "jaxinfer.decode", "jaxinfer.encode"), 2))  # none imports another

# The host half: importing any of these must not bring in JAX, however indirectly.
JAX_FREE = (
    "jaxinfer/__init__.py",
    "jaxinfer/architecture/*.py",
    "jaxinfer/request.py",
    "jaxinfer/prompts.py",
    "jaxinfer/segments.py",
    "jaxinfer/token_ids.py",
    "jaxinfer/conversation.py",
    "jaxinfer/config.py",
    "jaxinfer/stats.py",
    "jaxinfer/start_progress.py",
    "jaxinfer/sequence.py",
    "jaxinfer/structured/grammars.py",
    "jaxinfer/engine/intake.py",
    "jaxinfer/engine/output.py",
    "jaxinfer/tokenizer/*.py",
    "jaxinfer/kv_cache/spec.py",
    "jaxinfer/kv_cache/allocator.py",
    "jaxinfer/kv_cache/block_keys.py",
    "jaxinfer/kv_cache/radix_cache.py",
    "jaxinfer/kv_cache/manager.py",
    "jaxinfer/kv_transfer/handoff.py",
    "jaxinfer/kv_transfer/handoff_bytes.py",
    "jaxinfer/kv_transfer/same_mesh.py",
    "jaxinfer/kv_tiers/*.py",
    "jaxinfer/prefill/queue.py",
    "jaxinfer/prefill/chunk_size.py",
    "jaxinfer/prefill/scheduler.py",
    "jaxinfer/prefill/batch.py",
    "jaxinfer/decode/scheduler.py",
    "jaxinfer/decode/batch.py",
    "jaxinfer/multi_process/messages.py",
    "jaxinfer/multi_process/channel.py",
    "jaxinfer/encode/text_batching.py",
    "jaxinfer/encode/queue.py",
    "jaxinfer/encode/batch.py",
    "jaxinfer/programs/buckets.py",
    "jaxinfer/planner/trace.py",
    "jaxinfer/planner/workload.py",
    "sharding/cost_model.py",
    "sharding/expert_exchange.py",
    "sharding/hardware.py",
    "sharding/pipeline.py",
    "sharding/stage_balancer.py",
    "checkpoints/errors.py",
    "checkpoints/json_file.py",
    "checkpoints/model_path.py",
    "checkpoints/user_folders.py",
    "checkpoints/source.py",
    "checkpoints/digest.py",
    "checkpoints/weight_map.py",
    "checkpoints/hub.py",
    "checkpoints/wheel_models.py",
    "checkpoints/sentence_files.py",
    "checkpoints/orbax_source.py",
    "checkpoints/converted_tensors.py",
    "checkpoints/safetensors_writer.py",
    "checkpoints/inventory.py",
    "server/*.py",  # the pattern's * also matches folders: all of server
)
JAX_FREE_EXCEPT = (
    "server/local_backend.py",
    "server/inspection.py",
    "server/planning.py",
    "server/weight_control.py",
    "server/workers/service.py",
    "server/workers/worker.py",
)  # they hold the engine or ask a model, and name no array themselves
JAX = ("jax", "jaxlib", "flax", "orbax", "optax", "safetensors.flax")

HIDDEN_IMPORTS_ALLOWED = ("server/cli/*.py", "jaxinfer/__init__.py", "jaxinfer/engine/__init__.py")
MAX_LINES = 400
LONGER_ALLOWED = ("pallas_kernels/*/mosaic_gpu.py",)
VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "misc"}
# Names that the code has left for the field's, and what it says instead (docs/glossary.md). None may be defined again.
RETIRED_NAMES = {
    "How": "AttentionParams",
    "Attend": "LayerAttention",
    "AttendInLayers": "AttentionBackend",
    "AttendOverPages": "PagedAttentionBackend",
    "Kernels": "AttentionKernels",
    "_Kernels": "PrefillKernels, DecodeKernels",
    "Place": "KVCacheLocation, ParameterSlice, JobText: what it is a place of",
    "CachedRun": "CachedBlock",
    "runs_for": "blocks_for",
    "most_runs": "max_blocks",
    "most_pages": "max_pages",
    "most_tokens": "max_tokens",
    "keep_free": "reserved_pages",
    "take_cached": "match_prefix",
    "seat": "assign_slot",
    "Pace": "ChunkSizeController",
    "why_not": "unsupported_reason",
    "feed_step": "forward_step",
    "of_lanes": "micro_batch_buckets",
    "num_lanes": "num_micro_batches",
    "num_active_lanes": "num_active_micro_batches",
    "FeedStep": "ForwardStep",
    "surprises": "unexpected",
    "num_surprises": "num_unexpected_compilations",
    "EVERYTHING": "FULL_ATTENTION",
    "ANYONE": "DEFAULT_CONTEXT",
    "Turnstile": "BatchAdmission",
    "Pass": "Permit",
    "FrontDoor": "RequestMiddleware",
    "Doom": "PeerFailureMonitor",
    "doom": "monitor",
    "watched": "surface_peer_failure",
    "Moves": "PageTransport",
    "MeshMoves": "MeshPageTransport",
    "StageMoves": "StagePageTransport",
    "over_parts": "shard_over_vocab",
    "on_part": "on_shard",
    "sent_home": "combine_expert_outputs",
    "Parts": "EngineComponents, TokenizerComponents, PartialSums",
    "as_part": "as_partial_sum",
    "summed": "reduce_partial_sums",
    "run_part": "run_slice",
    "assemble": "build",
    "assembled": "wait_until_built",
    "_make_way": "_preempt_for_progress",
    "_make_room": "_preempt_for_admission",
    "make_room": "preempt_for_admission",
    "MakeRoom": "PreemptForAdmission",
    "Alone": "SingleProcess",
    "Asked": "RequestIdentity",
    "Awaited": "PendingArray",
    "Words": "PreTokenization",
    "Found": "TierMatch",
    "Held": "RemoteArray",
    "PlainForward": "ReferenceForward",
    "plain_forward": "reference_forward",
    "MatrixFormat": "ModelWeightFormat",
    "InStack": "StackedMatrix",
    "DryRun": "TargetPlan",
    "dry_run": "plan_target",
    "Turned": "TransposedRef",
    "Multiplier": "ConsumerWarpgroup",
    "Tiling": "DecodeTiling, PrefillTiling, GroupedMatmulTiling: which kernel's",
    "Sizes": "PrefillBlocking, BenchmarkSizes, MlpSizes",
    "Part": "KVSplit, PackedArray",
    "Work": "TileWork, PieceBounds, RooflineWork, ScalingWorkload",
    "first_seen": "first_visible",
    "shrink": "rescale",
    "NOTHING": "MASKED_SCORE",
    "compiled_for": "target_device",
    "card_of": "card_for",
    "in_code_order": "to_code_order",
    "share_of": "split_work",
    "Company": "PeerSet",
    "Asker": "RequestBuilder",
    "Ways": "Implementations",
    "Others": "BackgroundLoad",
    "GPU_WAY": "GPU_BACKEND",
    "Absent": "PeerUnavailable",
    "Likeness": "DistributionDistance",
    "Noticed": "AttackImpact",
    "is_held": "is_met",
    "words_of": "vocabulary_words",
    "jax_about": "describe_jax",
    "Reading": "ParameterPolicy",
    "of_api": "api_keys",
    "Steps": "StepTimes, StepRunner, BatchIncrements",
    "steps_of": "increments_of",
    "Fitted": "CalibrationFit",
    "Timed": "CalibrationCase",
    "_InFlight": "_InFlightPrefill, _InFlightDecode, _InFlightBatch",
}
RETIRED_MODULES = {
    "jaxinfer.first_runs": "jaxinfer.engine.warmup",
    "jaxinfer.assembly": "jaxinfer.engine.builder",
    "jaxinfer.plain_forward": "jaxinfer.reference_forward",
    "jaxinfer.servable": "jaxinfer.checkpoint_check",
    "jaxinfer.distributed": "jaxinfer.multi_process",
    "jaxinfer.dry_run": "jaxinfer.planner",
    "jaxinfer.plan": "jaxinfer.planner.engine_plan",
    "jaxinfer.encode.texts": "jaxinfer.encode.text_batching",
    "jaxinfer.layers.attention_over_pages": "jaxinfer.layers.paged_attention",
    "jaxinfer.layers.heads": "jaxinfer.architecture.head_layout",
    "jaxinfer.layers.int8": "jaxinfer.weights.formats.int8",
    "jaxinfer.layers.packed": "jaxinfer.weights.formats.packed",
    "jaxinfer.layers.parts": "jaxinfer.layers.deferred_collectives",
    "jaxinfer.models.config": "jaxinfer.architecture.model_config",
    "jaxinfer.models.encoder_config": "jaxinfer.architecture.encoder_config",
    "jaxinfer.models.shapes": "jaxinfer.architecture.known_models",
    "jaxinfer.prefill.pace": "jaxinfer.prefill.chunk_size",
    "jaxinfer.runtime.cut": "jaxinfer.planner.stage_partition",
    "jaxinfer.runtime.compilation": "jaxinfer.programs.compilation",
    "jaxinfer.runtime.program_cache": "jaxinfer.programs.cache",
    "jaxinfer.runtime.program_key": "jaxinfer.programs.key",
    "jaxinfer.runtime.stage": "jaxinfer.pipeline.stage",
    "jaxinfer.runtime.work": "jaxinfer.planner.model_work",
    "jaxinfer.runtime.conversion": "jaxinfer.weights.conversion",
    "jaxinfer.runtime.expert_packing": "jaxinfer.weights.expert_packing",
    "jaxinfer.runtime.format_choice": "jaxinfer.weights.format_choice",
    "jaxinfer.runtime.load": "jaxinfer.weights.load",
    "jaxinfer.runtime.template": "jaxinfer.weights.template",
    "jaxinfer.sampling.counting": "jaxinfer.sampling.token_counts",
    "jaxinfer.sampling.reading": "jaxinfer.sampling.logprob_readback",
    "jaxinfer.chat_template": "jaxinfer.tokenizer.chat_template",
    "jaxinfer.detokenizer": "jaxinfer.tokenizer.detokenizer",
    "jaxinfer.untrusted_text": "jaxinfer.tokenizer.untrusted_text",
    "jaxinfer.tokenizer.parts": "jaxinfer.tokenizer.components",
    "server.batches.turnstile": "server.batches.batch_admission",
    "server.openai.front_door": "server.openai.request_middleware",
    "pallas_kernels.seen": "pallas_kernels.visibility",
    "pallas_kernels.mosaic.shares": "pallas_kernels.mosaic.split_combine",
    "pallas_kernels.mosaic.tuned": "pallas_kernels.mosaic.tuned_tilings",
    "pallas_kernels.paged_attention.mosaic_multiplier": "pallas_kernels.paged_attention.mosaic_consumer",
    "pallas_kernels.paged_attention.tokens": "pallas_kernels.paged_attention.query_rows",
    "pallas_kernels.ragged_prefill_attention.mosaic_work": "pallas_kernels.ragged_prefill_attention.mosaic_tile_work",
    "pallas_kernels.grouped_matmul.work": "pallas_kernels.grouped_matmul.row_pieces",
    "pallas_kernels.llvm.machine": "pallas_kernels.llvm.host",
    "server.openai.reading": "server.openai.parameter_policy",
    "checkpoints.outgoing": "checkpoints.converted_tensors",
    "checkpoints.filling": "checkpoints.parameter_filling",
    "checkpoints.embedded": "checkpoints.wheel_models",
}
KERNEL_FILES = ("__init__.py", "op.py", "reference.py", "cases.py")
SHARED_BY_KERNELS = {"llvm", "mosaic"}


@dataclass(frozen=True)
class Import:
    names: tuple[str, ...]  # the module named, then for `from m import n` each m.n, which may be a module too
    line: int
    is_hidden: bool


@dataclass(frozen=True)
class Module:
    path: str  # from the root, with slashes
    source: str

    @property
    def name(self) -> str:
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]


Modules = Mapping[str, Module]  # by dotted name


def modules_of(sources: Mapping[str, str]) -> dict[str, Module]:
    """Source text by path -> modules by name."""
    modules = [Module(path, source) for path, source in sources.items()]
    return {m.name: m for m in modules}


def read(root: Path, folders: Iterable[str]) -> dict[str, Module]:
    """Every Python file under the root's folders."""
    paths = [p for folder in folders for p in sorted((root / folder).rglob("*.py")) if "_pb2" not in p.name]
    return modules_of({p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in paths})


def imports_of(module: Module) -> Iterator[Import]:
    tree = ast.parse(module.source, module.path)
    visible = set(tree.body)
    for node in tree.body:  # `try: import x` at the top stays visible
        if isinstance(node, ast.Try):
            visible |= {*node.body, *node.orelse, *(s for h in node.handlers for s in h.body)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import((alias.name,), node.lineno, node not in visible)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.package.split(".")[: len(module.package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            yield Import((base, *(f"{base}.{a.name}" for a in node.names)), node.lineno, node not in visible)


def targets_of(found: Import, modules: Modules) -> set[str]:
    """The project's modules an import names: the submodules where `from package import module`, else the module itself."""
    within = [name for name in found.names[1:] if name in modules]
    is_whole = len(within) == len(found.names) - 1 and within
    return set(within) | (set() if is_whole or found.names[0] not in modules else {found.names[0]})


def _is_in(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def wrong_arrows(modules: Modules) -> list[str]:
    """Imports between top-level packages that the table of ARROWS doesn't have; the packages import no tests or examples either."""
    breaches = []
    for module in modules.values():
        own = module.name.split(".")[0]
        rule = max((r for r in ARROWS if _is_in(module.name, r)), key=len, default=None)
        if rule is None:
            continue
        for found in imports_of(module):
            for name in targets_of(found, modules) or {found.names[0]}:
                top = name.split(".")[0]
                if top == own or top not in (*PACKAGES, "tests", "benchmarks", "examples"):
                    continue
                if not any(_is_in(name, allowed) for allowed in ARROWS[rule]):
                    breaches.append(
                        f"{module.path}:{found.line} imports {name}: {rule} may import {', '.join(ARROWS[rule]) or 'none of the others'}"
                    )
    return breaches


def layer_of(name: str) -> int | None:
    """The depth at which LAYERS places a module, by the longest entry that holds it."""
    depths = {member: depth for depth, members in enumerate(LAYERS) for member in members}
    holds = [m for m in depths if name == m or (m != "jaxinfer" and _is_in(name, m))]
    return depths[max(holds, key=len)] if holds else None


def upward_imports(modules: Modules) -> list[str]:
    """Imports inside jaxinfer that point to a higher layer or from one twin to the other; modules that LAYERS doesn't place."""
    inside = [m for m in modules.values() if _is_in(m.name, "jaxinfer")]
    breaches = [f"{m.path} has no layer: place it in LAYERS" for m in inside if layer_of(m.name) is None]
    for module in inside:
        for found in imports_of(module):
            for name in sorted(targets_of(found, modules)):
                here, there = layer_of(module.name), layer_of(name)
                if here is not None and there is not None and there < here:
                    breaches.append(f"{module.path}:{found.line} imports {name}, which is above it")
                if any(_is_in(module.name, a) and _is_in(name, b) for a, b in TWINS):
                    breaches.append(f"{module.path}:{found.line} imports {name}: prefill and decode never import each other")
    return breaches


def import_cycles(modules: Modules) -> list[str]:
    """One line for each group of modules that import one another in a ring."""
    graph = {m.name: sorted({t for i in imports_of(m) for t in targets_of(i, modules)} - {m.name}) for m in modules.values()}
    done: set[str] = set()
    rings: dict[frozenset[str], str] = {}

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            ring = trail[trail.index(name) :]
            rings.setdefault(frozenset(ring), " -> ".join([*ring, name]))
            return
        if name in done:
            return
        for target in graph[name]:
            visit(target, [*trail, name])
        done.add(name)

    for name in graph:
        visit(name, [])
    return sorted(rings.values())


def ways_to_jax(modules: Modules) -> list[str]:
    """For each module of the host half that leads to JAX, the chain of imports that does. Hidden imports run later: not counted."""

    @cache
    def imported(name: str) -> tuple[list[str], set[str]]:
        """What of JAX a module imports, and the modules that it runs."""
        shown = [i for i in imports_of(modules[name]) if not i.is_hidden]
        reached = sorted({n for i in shown for n in i.names if any(_is_in(n, j) for j in JAX)})
        # Importing a.b.c runs a and a.b first.
        named = {t for i in shown for t in targets_of(i, modules)} | {name}
        parents = {".".join(n.split(".")[:k]) for n in named for k in range(1, n.count(".") + 1)}
        return reached, (named | parents) & modules.keys()

    breaches = []
    for start in modules.values():
        if not any(fnmatch(start.path, p) for p in JAX_FREE):
            continue
        is_excepted = start.path in JAX_FREE_EXCEPT
        seen, queue = {start.name}, [[start.name]]
        while queue:
            chain = queue.pop(0)
            reached, others = imported(chain[-1])
            if reached:
                breaches.append(" -> ".join([*chain, reached[0]]))
                break
            if is_excepted:
                break
            for name in sorted(others - seen):
                seen.add(name)
                queue.append([*chain, name])
    return breaches


def hidden_imports(modules: Modules) -> list[str]:
    """Imports inside functions, classes or `if TYPE_CHECKING`, and those by name at run time."""
    breaches = []
    for module in modules.values():
        if any(fnmatch(module.path, p) for p in HIDDEN_IMPORTS_ALLOWED):
            continue
        breaches += [f"{module.path}:{i.line} imports {i.names[0]} out of sight" for i in imports_of(module) if i.is_hidden]
        for node in ast.walk(ast.parse(module.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "import_module", "importlib.import_module"):
                breaches.append(f"{module.path}:{node.lineno} imports by name at run time")
    return breaches


def global_statements(modules: Modules) -> list[str]:
    return [
        f"{m.path}:{n.lineno} global {', '.join(n.names)}"
        for m in modules.values()
        for n in ast.walk(ast.parse(m.source))
        if isinstance(n, ast.Global)
    ]


def unannotated_functions(modules: Modules) -> list[str]:
    """Public functions and methods with a parameter or a result that has no type."""
    breaches = []
    for module in modules.values():
        for function, is_method in _public_functions(ast.parse(module.source).body):
            a = function.args
            parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]
            is_static = any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
            first = 1 if is_method and not is_static else 0
            missing = [p.arg for p in parameters[first:] if p.annotation is None] + (["its result"] if function.returns is None else [])
            if missing:
                breaches.append(f"{module.path}:{function.lineno} {function.name}: no type for {', '.join(missing)}")
    return breaches


def retired_names(modules: Modules) -> list[str]:
    """Modules, classes, functions, parameters, variables and attributes that bring back a name of RETIRED_NAMES or RETIRED_MODULES."""
    breaches = []
    for module in modules.values():
        if module.name in RETIRED_MODULES:
            breaches.append(f"{module.path} is {RETIRED_MODULES[module.name]} now")
        for node in ast.walk(ast.parse(module.source)):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                    pass
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    pass
                case _:
                    continue
            if name in RETIRED_NAMES:
                breaches.append(f"{module.path}:{node.lineno} {name}: say {RETIRED_NAMES[name]}")
    return breaches


def repeated_class_names(modules: Modules) -> list[str]:
    """Top-level classes that have the name of another top-level class or type alias; leading underscores don't count. One
    word has one meaning."""
    defined: dict[str, list[tuple[str, bool]]] = {}  # name -> each place, and whether it is a class
    for module in modules.values():
        for node in ast.parse(module.source).body:
            match node:
                case ast.ClassDef(name=name):
                    defined.setdefault(name.lstrip("_"), []).append((f"{module.path}:{node.lineno}", True))
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if not name.isupper():
                    defined.setdefault(name.lstrip("_"), []).append((f"{module.path}:{node.lineno}", False))
    return [
        f"{name}: {', '.join(place for place, _ in places)}"
        for name, places in sorted(defined.items())
        if len(places) > 1 and any(is_class for _, is_class in places)
    ]


def _public_functions(body: list[ast.stmt], is_method: bool = False) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
            not node.name.startswith("_") or node.name in ("__init__", "__call__")
        ):
            yield node, is_method
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node.body, is_method=True)


def incomplete_kernels(paths: Iterable[str]) -> list[str]:
    """Folders of pallas_kernels that lack one of an op's files. `paths`: every Python file of the project."""
    present = set(paths)
    folders = {p.split("/")[1] for p in present if p.startswith("pallas_kernels/") and p.count("/") > 1} - SHARED_BY_KERNELS
    return [f"pallas_kernels/{f}/ lacks {k}" for f in sorted(folders) for k in KERNEL_FILES if f"pallas_kernels/{f}/{k}" not in present]


def long_files(modules: Modules, limit: int = MAX_LINES) -> list[str]:
    counts = {m.path: m.source.count("\n") for m in modules.values() if not any(fnmatch(m.path, p) for p in LONGER_ALLOWED)}
    return [f"{path} has {count} lines: at most {limit}" for path, count in counts.items() if count > limit]


def vague_names(paths: Iterable[str]) -> list[str]:
    """Files and folders named for no room in particular."""
    return [f"{path}: say what it is for" for path in paths if VAGUE_NAMES & {part.removesuffix(".py") for part in path.split("/")}]


def unmentioned_packages(modules: Modules, tree: str) -> list[str]:
    """Packages that the text doesn't name as `folder/`."""
    packages = {m.name for m in modules.values() if m.path.endswith("__init__.py")}
    return [f"{name} is not in the tree" for name in sorted(packages) if name.rpartition(".")[2] + "/" not in tree]
