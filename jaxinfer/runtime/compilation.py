"""Programs compiled ahead of time, side by side in threads; and a count of every compilation XLA makes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class _Counter(threading.local):
    """Compilations that this thread asked for and did not expect: those outside `compiling()`. XLA compiles in the thread that
    calls for it, so what else a process compiles elsewhere is not mistaken for the engine's."""

    depth = 0
    num_surprises = 0

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Within it compilations are expected."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def on_compile(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT and not self.depth:
            self.num_surprises += 1


class _Total:
    """What XLA compiled in this process, less what it found in the persistent cache."""

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
jax.monitoring.register_event_listener(TOTAL.on_event)


@dataclass(frozen=True)
class ProgramSource:
    """A pure function and the abstract arguments of one bucket."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # ShapeDtypeStructs with shardings
    mesh: Mesh
    donated: tuple[int, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # XLA's, where a program does better with others than the default


def abstract_like(tree: Any, sharding: NamedSharding) -> Any:
    """Shapes and types of a pytree of arrays, so sharded."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


Executable = Callable[..., Any]


def compile_program(source: ProgramSource) -> Executable:
    """Trace, lower and compile one program for its mesh."""
    with COUNTER.compiling(), jax.set_mesh(source.mesh):
        lowered = jax.jit(source.function, donate_argnums=source.donated).lower(*source.arguments)
        try:
            return lowered.compile(compiler_options=dict(source.options))
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return lowered.compile()  # an option of another version of XLA: it made the program faster, not right


def compile_programs(sources: Sequence[ProgramSource]) -> dict[str, Executable]:
    """Every program by its name. XLA releases Python's lock, so some compile while others are traced."""
    with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1), "compile") as pool:
        return dict(zip([s.name for s in sources], pool.map(compile_program, sources), strict=True))


def use_persistent_cache() -> Path:
    """Keep compiled programs under the user's cache directory, unless JAX was told of another. Returns the folder."""
    folder = jax.config.values.get("jax_compilation_cache_dir")
    if folder is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = str(base / "jaxinfer" / "xla")
        jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Path(folder)
