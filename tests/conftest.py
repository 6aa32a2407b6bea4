"""What the tests share: eight CPU devices, and engines that are built once.

An engine costs seconds, so tests take theirs from `llms`, which keeps one for each configuration while the tests of a folder run. Then they
are let go, or after a file that leaves many: a compiled program takes some ten memory mappings, of which Linux gives a process 65,530, and past
them compilers crash.
"""

from __future__ import annotations

import gc
import itertools
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compiler

from jaxinfer.llm import LLM
from jaxinfer.prefill.worker import Prefilled, PrefillWorker
from jaxinfer.runtime.compilation import use_persistent_cache
from tests import tiny_model
from tests.covering import each_parameter, mark_exhaustive, name_of

# A shell has what it starts in the background ignore Ctrl+C, which tests send to themselves and to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything makes an array. Eight devices stand in for two meshes of several each.
jax.config.update("jax_num_cpu_devices", 8)
# No sum of an int and a float whose type nobody chose. (Rank promotion stays allowed: a norm's scale is [D] by design.)
jax.config.update("jax_numpy_dtype_promotion", "strict")
use_persistent_cache()

# Small, so that pages run out when a test wants them to; few programs, and shared by as many tests as can be.
TINY = {"kv_memory": "512KiB", "max_batch_size": 32, "decode_buckets": (1, 8, 32), "prefill_buckets": (32, 128), "prefill_chunk_size": 128}

# The default model's. One set of programs for all tests that need no others: each costs seconds to compile.
DEFAULT = {
    "dtype": "float32",
    "kv_memory": "256MiB",
    "max_model_len": 2048,
    "max_batch_size": 8,
    "decode_buckets": (8,),
    "prefill_buckets": (128, 512),
}

_MOST_MAPPINGS = 20_000  # of this process's memory, when a file begins

# Folders that build engine after engine of tiny models, and hold what one does against another or against a plain model of it: LLVM's optimisations
# take more there than they give. What real models, layers, kernels and the sampler compute is tested as it is compiled for users.
_COMPILED_QUICKLY = {
    "decode",
    "multi_process",
    "dry_run",
    "engine",
    "families",
    "gpu",  # benchmarks of one, in tiny sizes
    "kv_transfer",
    "parallel",
    "prefill",
    "runtime",
    "server",
    "sharding",
}
# And files of such tests: what interprets a kernel for GPUs is no one's program, nor is a plain pass that another is held against.
_ALSO_QUICKLY = "*_gpu.py", "test_int8.py"
# Of these the ones that look at the programs themselves, what is said between devices and what memory they take: XLA's passes are users' there. In the
# others no fusion goes through MLIR, which is half of what compiling then takes, and no program through 32 compilers.
_PROGRAMS_ARE_LOOKED_AT = {"dry_run", "sharding"}
_WITHOUT_MLIR = [("xla_cpu_use_fusion_emitters", False), ("xla_cpu_parallel_codegen_split_count", 1)]
# The same for a process that a test starts.
QUICK_COMPILATION = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "XLA_FLAGS": " ".join(f"--{name}={str(value).lower()}" for name, value in _WITHOUT_MLIR),
}

# Folders whose tests multiply layouts, types, sizes and families: each case costs a compilation. `make test` takes of each matrix as many cases as
# have each value of each axis, `make test-exhaustive` all.
_THINNED = {
    "decode",
    "distributed",
    "dry_run",
    "e2e",
    "encode",
    "engine",
    "families",
    "gpu",
    "kernels",
    "kv_transfer",
    "layers",
    "models",
    "parallel",
    "prefill",
    "runtime",
    "sampling",
    "sharding",
}

MakeLLM = Callable[..., LLM]
_MADE = pytest.StashKey[dict[Any, LLM]]()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for _, cases in itertools.groupby((item for item in items if item.path.parent.name in _THINNED), name_of):
        mark_exhaustive(list(cases), each_parameter)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """As its folder is to be compiled."""
    folder, is_timed = item.path.parent.name, item.get_closest_marker("measured") is not None
    is_quick = (folder in _COMPILED_QUICKLY or any(map(item.path.match, _ALSO_QUICKLY))) and not is_timed
    jax.config.update("jax_disable_most_optimizations", is_quick)
    _more_options[:] = _WITHOUT_MLIR if is_quick and folder not in _PROGRAMS_ARE_LOOKED_AT else []


_usual_options = compiler.get_compile_options
_more_options: list[tuple[str, bool | int]] = []


def _options(*args: Any, **kwargs: Any) -> Any:
    """Of every compilation. JAX has no setting for more of XLA's than the one above, and XLA_FLAGS are the whole process's."""
    options = _usual_options(*args, **kwargs)
    options.env_option_overrides += _more_options
    return options


compiler.get_compile_options = _options


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Let go of a folder's engines, and of what JAX keeps of them, after its last test or once they are too many."""
    yield
    if nextitem is None or nextitem.path == item.path:
        return
    if nextitem.path.parent != item.path.parent or num_mappings() > _MOST_MAPPINGS:
        item.config.stash.get(_MADE, {}).clear()
        gc.collect()
        jax.clear_caches()


@pytest.fixture
def prefills_are_read_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill step's result is waited for once it was looked for as often as the role has stages. On a busy machine it may come any later:
    requests that a test wants to meet in decode, and to run out of pages there, would decode one after another."""
    looked: Counter[tuple[int, float]] = Counter()
    collect = PrefillWorker.collect

    def collect_soon(worker: PrefillWorker, *, wait: int, **rest: Any) -> list[Prefilled]:
        steps = [(id(worker), step.launched_at) for step in worker._in_flight]
        num_late = sum(looked[step] >= worker._runner.num_stages for step in steps)
        looked.update(steps)
        return collect(worker, wait=max(wait, num_late), **rest)

    monkeypatch.setattr(PrefillWorker, "collect", collect_soon)


def num_mappings() -> int:
    """Memory mappings of this process; 0 where nobody tells."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def llms(tiny_model_path: Path, pytestconfig: pytest.Config) -> MakeLLM:
    """Gives the LLM over the tiny model with these settings changed, made on first use."""
    made = pytestconfig.stash.setdefault(_MADE, {})

    def make(**settings: Any) -> LLM:
        key = tuple(sorted(settings.items()))
        if key not in made:
            made[key] = LLM(str(tiny_model_path), **(TINY | settings))
        return made[key]

    return make


@pytest.fixture
def llm(llms: MakeLLM) -> LLM:
    """The tiny model on one device."""
    return llms()


@pytest.fixture
def default_llm(pytestconfig: pytest.Config) -> LLM:
    """The embedded default model, SmolLM2-135M-Instruct, on one device."""
    made = pytestconfig.stash.setdefault(_MADE, {})
    if "default" not in made:
        made["default"] = LLM(**DEFAULT)
    return made["default"]
