"""What the tests share: eight CPU devices, and engines that are built once.

An engine costs seconds, so tests take theirs from `llms`, which keeps one for each configuration while the tests of a folder run. Then they
are let go, or after a file that leaves many: a compiled program takes some ten memory mappings, of which Linux gives a process 65,530, and past
them compilers crash.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.llm import LLM
from jaxinfer.prefill.worker import Prefilled, PrefillWorker
from jaxinfer.programs.compilation import use_persistent_cache
from tests import tiny_model
from tests.covering import each_parameter, mark_exhaustive, name_of

# A shell has what it starts in the background ignore Ctrl+C, which tests send to themselves and to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# XLA reads this before the first array, and so does every process that a test starts: no program goes through 32 compilers, and no fusion through MLIR,
# which is half of what compiling takes. JAX 0.11 has no other way, and ends a process with a flag that it doesn't know. `XLA_FLAGS= pytest` compiles as
# for users.
_WITHOUT_MLIR = ["--xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 11) else []
os.environ.setdefault("XLA_FLAGS", " ".join(["--xla_cpu_parallel_codegen_split_count=1", *_WITHOUT_MLIR]))
# Before anything makes an array. Eight devices stand in for two meshes of several each.
jax.config.update("jax_num_cpu_devices", 8)
# No sum of an int and a float whose type nobody chose. (Rank promotion stays allowed: a norm's scale is [D] by design.)
jax.config.update("jax_numpy_dtype_promotion", "strict")
use_persistent_cache()

# Small, so that pages run out when a test wants them to; few programs, and shared by as many tests as can be.
TINY = {
    "dtype": "float32",
    "kv_memory": "512KiB",
    "max_batch_size": 32,
    "decode_buckets": (8, 32),
    "prefill_buckets": (32, 128),
    "prefill_chunk_size": 128,
}

# The default model's. One set of programs for all tests that need no others: each costs seconds to compile.
DEFAULT = {
    "dtype": "float32",
    "kv_memory": "256MiB",
    "max_model_len": 2048,
    "max_batch_size": 16,
    "decode_buckets": (16,),
    "prefill_buckets": (128,),
    "prefill_chunk_size": 128,
}

_MOST_MAPPINGS = 20_000  # of this process's memory, when a file begins

# What is compiled as it is for users, by LLVM's every optimisation, before a release: what layers, kernels, the sampler and encoders compute, and the
# default model. Else engine after engine of tiny models is built and compared with another: optimisations take more there than they give.
_OPTIMISED_FOLDERS = {"encode", "kernels", "layers", "models", "sampling"}
_OPTIMISED_FILES = ("test_parity_paged.py", "test_sampler.py")  # always: these compute more than they compile
# But what interprets a kernel for GPUs is no one's program.
_QUICK_FILES = ("*_gpu.py",)
# The same for a process that a test starts.
QUICK_COMPILATION = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}

_OF_DEFAULT_MODEL = ("test_default_model.py", "test_examples.py", "test_parity_golden.py")

# Folders whose tests multiply layouts, types, sizes and families: each case costs a compilation. `make test` takes of each matrix as many cases as
# have each value of each axis, `make test-exhaustive` all.
_THINNED = {
    "decode",
    "multi_process",
    "planner",
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
    "pipeline",
    "programs",
    "weights",
    "sampling",
    "sharding",
}

# Of an interpreted kernel each test has one case here: `make test-aot` runs them all with what is compiled.
_INTERPRETED = "tests/kernels/test_*_gpu.py"

MakeLLM = Callable[..., LLM]
_MADE = pytest.StashKey[dict[Any, LLM]]()


# Whose files take minutes. They come first, so that of two processes neither is left with one of them in the end.
_LONG = ("e2e", "families", "parallel", "multi_process", "kernels", "engine", "benchmarks")


def pytest_collection_finish() -> None:
    """Tracing makes so many containers that Python would look for garbage in a tenth of the time, over all that is imported and collected."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that one process is to run, for they share engines: a file's, or all that ask the default model."""
    from xdist.scheduler import LoadFileScheduling  # not where kernels are compiled for other machines

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "the default model" if Path(file).name in _OF_DEFAULT_MODEL else file

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.match("test_parity_*.py") and not set(_LONG).intersection(item.path.parts))
    for _, cases in itertools.groupby((item for item in items if item.path.parent.name in _THINNED), name_of):
        found = list(cases)
        mark_exhaustive(found, (lambda item: {name_of(item)}) if found[0].path.match(_INTERPRETED) else each_parameter)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """As its folder is to be compiled."""
    is_before_a_release = "not exhaustive" not in item.config.getoption("markexpr")
    is_optimised = is_before_a_release and item.path.parent.name in _OPTIMISED_FOLDERS and not any(map(item.path.match, _QUICK_FILES))
    is_optimised |= (
        item.path.parent.name == "sampling"
        or any(map(item.path.match, _OPTIMISED_FILES))
        or item.get_closest_marker("measured") is not None
    )
    jax.config.update("jax_disable_most_optimizations", not is_optimised)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Let go of a folder's engines, and of what JAX keeps of them, after its last test or once they are too many."""
    yield
    if nextitem is None or nextitem.path == item.path:
        return
    if nextitem.path.parent != item.path.parent or num_mappings() > _MOST_MAPPINGS:
        made = item.config.stash.get(_MADE, {})
        kept = {key: llm for key, llm in made.items() if key == "default" and any(map(nextitem.path.match, _OF_DEFAULT_MODEL))}
        made.clear()
        made.update(kept)
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
        num_late = sum(looked[step] >= worker.runner.num_stages for step in steps)
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


@pytest.fixture(scope="module")
def default_llm(pytestconfig: pytest.Config) -> LLM:
    """The embedded default model, SmolLM2-135M-Instruct, on one device."""
    made = pytestconfig.stash.setdefault(_MADE, {})
    if "default" not in made:
        made["default"] = LLM(**DEFAULT)
    return made["default"]
