"""Programs compiled ahead of time, in parallel threads; and a count of every compilation that XLA makes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache  # whose folder JAX lets nobody stand in for
from jax._src.config import persistent_cache_min_compile_time_secs  # alone among JAX's settings of it: a thread's own
from jax.sharding import Mesh, NamedSharding

from checkpoints.user_folders import cache_folder
from jaxinfer.programs.cache import JaxCache, ProgramCache
from jaxinfer.programs.key import UnknownOriginError, describe, surroundings
from jaxinfer.programs.key import sources as source_digest
from jaxinfer.programs.private_folder import PrivateFolder, check_folder
from sharding.mesh import is_cpu

_LOG = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT_EVENT = "/jax/compilation_cache/cache_hits"

# XLA counts a page pool once for each in-place write, concludes that memory is short and rematerializes small values in
# every layer: three more launches a layer of decode, and no byte saved.
_ACCELERATOR_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
# XLA makes CUDA graphs of five or more consecutive launches. A branch outside a graph blocks the host until all work
# before it is done, and between collectives there may be fewer than five launches.
_BRANCHES_IN_GRAPHS = {"xla_gpu_graph_min_graph_size": "1"}


class _Counter(threading.local):
    """Unexpected compilations of this thread: those outside `compiling()`; and its hits in JAX's cache. XLA compiles
    in the thread that asks for it, so other threads' compilations are not counted as the engine's."""

    depth = 0
    num_unexpected_compilations = 0
    num_hits = 0

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compilations within this context are expected."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def on_compile(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT and not self.depth:
            self.num_unexpected_compilations += 1

    def on_event(self, event: str, **_: Any) -> None:
        self.num_hits += event == _HIT_EVENT


class _Total:
    """Programs that XLA compiled in this process, without those found in the persistent cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_compilations = 0

    def on_compile(self, event: str, duration_secs: float, **_: Any) -> None:
        self._add(1 if event == _COMPILE_EVENT else 0)

    def on_event(self, event: str, **_: Any) -> None:
        self._add(-1 if event == _HIT_EVENT else 0)

    def _add(self, count: int) -> None:
        with self._lock:
            self.num_compilations += count


COUNTER = _Counter()
TOTAL = _Total()
jax.monitoring.register_event_duration_secs_listener(COUNTER.on_compile)
jax.monitoring.register_event_duration_secs_listener(TOTAL.on_compile)
jax.monitoring.register_event_listener(COUNTER.on_event)
jax.monitoring.register_event_listener(TOTAL.on_event)


@dataclass(frozen=True)
class ProgramSource:
    """A pure function and the abstract arguments of one bucket."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # ShapeDtypeStructs with shardings
    mesh: Mesh
    donated: tuple[int, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # of XLA, where the defaults are slower


def abstract_like(tree: Any, sharding: NamedSharding) -> Any:
    """Shapes and types of a pytree of arrays, with this sharding."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def options_of_sampling(mesh: Mesh) -> dict[str, str]:
    """XLA options for a program with branches between collectives."""
    return _BRANCHES_IN_GRAPHS if mesh.size > 1 and not is_cpu(mesh) else {}


Executable = Callable[..., Any]


def compile_program(source: ProgramSource) -> jax.stages.Compiled:
    """Trace, lower and compile one program for its mesh."""
    return _compile(_lower(source), source)


def compile_programs(sources: Sequence[ProgramSource], compiled: Callable[[], None] = lambda: None) -> dict[str, Executable]:
    """All programs by name; those of earlier starts come from the cache. `compiled` is called after each, in several
    threads. XLA releases Python's lock, so some programs compile while others are traced."""
    cache = _program_cache()

    def one(source: ProgramSource) -> Executable:
        program = compile_program(source) if cache is None else _kept_program(source, cache)
        compiled()
        return program

    with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1), "compile") as pool:
        return dict(zip([s.name for s in sources], pool.map(one, sources), strict=True))


def _kept_program(source: ProgramSource, cache: ProgramCache) -> Executable:
    devices = list(source.mesh.devices.flat)
    try:
        around = describe((source.arguments, source.mesh, source.donated, source.options)) + surroundings()
        origin = describe(source.function) + around + source_digest()
    except UnknownOriginError as error:
        _LOG.info("%s isn't cached: %s", source.name, error)
        return compile_program(source)
    program = cache.by_origin(origin, source.arguments, devices)
    if program is not None:
        return program
    lowered = _lower(source)
    text = lowered.as_text() + around
    program = cache.by_text(origin, text, lowered, source.arguments, devices)
    if program is not None:
        return program
    num_hits = COUNTER.num_hits
    with persistent_cache_min_compile_time_secs(math.inf):  # JAX is not to cache it too
        program = _compile(lowered, source)
    if COUNTER.num_hits == num_hits:  # else it came from JAX's cache and can't be serialized
        cache.keep(origin, text, lowered, program)
    return program


def _lower(source: ProgramSource) -> jax.stages.Lowered:
    with COUNTER.compiling(), jax.set_mesh(source.mesh):
        return jax.jit(source.function, donate_argnums=source.donated).lower(*source.arguments)


def _compile(lowered: jax.stages.Lowered, source: ProgramSource) -> jax.stages.Compiled:
    with COUNTER.compiling(), jax.set_mesh(source.mesh):
        try:
            return lowered.compile(
                compiler_options={**_ACCELERATOR_OPTIONS, **source.options} if not is_cpu(source.mesh) else dict(source.options)
            )
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return lowered.compile()  # another version of XLA lacks the option, which affects speed only


def _program_cache() -> ProgramCache | None:
    """The program cache, inside JAX's cache folder; None where JAX caches nothing, or not in a local folder. Programs
    of several processes are left to JAX's cache: a serialized program doesn't say which devices are this process's."""
    return _local_cache() if jax.process_count() == 1 else None


def program_files() -> PrivateFolder | None:
    """The files of the program cache and of JAX's; None where they are not kept."""
    cache = _local_cache()
    return None if cache is None else cache.files


def _local_cache() -> ProgramCache | None:
    folder = jax.config.values.get("jax_compilation_cache_dir")
    if folder is None or "://" in folder or not jax.config.values.get("jax_enable_compilation_cache"):
        return None
    return ProgramCache.at(Path(folder) / "programs", cache_folder() / "program-cache.key")


def use_persistent_cache() -> Path:
    """Cache compiled programs under the user's cache directory, or where JAX is configured to. Returns the folder."""
    folder = jax.config.values.get("jax_compilation_cache_dir")
    if folder is None:
        folder = str(cache_folder() / "xla")
        jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if "://" not in folder:
        _replace_jax_cache(_local_cache())
        try:
            check_folder(Path(folder))
        except OSError:  # else XLA would read autotuning results that another user may have written
            jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return Path(folder)


def use_portable_keys() -> None:
    """Have JAX's cache find what was cached in another folder, where it can. The caches that XLA for GPUs has are named
    by their paths, which become part of JAX's keys; XLA for CPUs has none. Call once the devices are known."""
    if jax.default_backend() == "cpu":
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def _replace_jax_cache(cache: ProgramCache | None) -> None:
    """Make JAX use this cache for its own entries: it would load any file that it finds."""
    compilation_cache.reset_cache()
    with compilation_cache._cache_initialized_mutex:
        compilation_cache._cache = JaxCache(cache)
        compilation_cache._cache_initialized = True
