"""The engines that are compared: their settings, how their workers and servers are started, and their requirements."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.venvs import LLAMA_CPP, PARITY, VLLM, Recipe
from benchmarks.worker import Worker

OURS = "jaxinfer"


@dataclass(frozen=True)
class ServerCommand:
    command: Sequence[str]  # without --host and --port
    ready_path: str  # answers 200 when the server is ready
    body: Mapping[str, Any]  # of a completion request: the server's parameters that keep it from ending early
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PeerEngine:
    family: str
    variant: str  # format of the weights
    bits: int  # a weight; ratios are to the peers with 16 and 32
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the worker
    recipe: Recipe | None = None  # its environment; None: this one
    # what it reads: the model itself, a float GGUF file made from it, or a Hugging Face folder made from it
    weights: str = "model"
    gives_logits: bool = True  # for each position of a text

    @property
    def name(self) -> str:
        return f"{self.family} {self.variant}"

    @property
    def is_ours(self) -> bool:
        return self.family == OURS

    @property
    def python(self) -> str:
        return str(self.recipe.python) if self.recipe else sys.executable

    def worker(self, model: Path, threads: int, context: int, environment: Mapping[str, str] | None = None, **settings: Any) -> Worker:
        """Its process, ready for sequences of `context` tokens. `settings` are added to its own. Raises
        `WorkerError`."""
        about = {"name": self.name, "model": str(model), "threads": threads, "context": context, **self.settings, **settings}
        given = vllm_environment(threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if self.family == "vLLM" else {}
        return Worker(
            self.python, f"benchmarks.peers.{MODULES[self.family]}", json.dumps(about), environment=given | dict(environment or {})
        )

    def server(self, model: Path, threads: int, context: int) -> ServerCommand | None:
        """How its server is started; None where it has none that is built for load."""
        return SERVERS[self.family](self, model, threads, context)


def _this_server(engine: PeerEngine, model: Path, threads: int, context: int) -> ServerCommand:
    flags = [word for name, value in engine.settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [engine.python, "-m", "server.cli", "serve", "--model", str(model), *flags, "--no-prefix-cache"]
    return ServerCommand(command, "/ready", {"ignore_eos": True})


def _llama_cpp_server(engine: PeerEngine, model: Path, threads: int, context: int) -> ServerCommand:
    # It runs one sequence at a time: a request that arrives meanwhile must wait, not end the one before.
    flags = {"model": model, "n_threads": threads, "n_threads_batch": threads, "n_ctx": context, "logits_all": False}
    flags |= {"interrupt_requests": False, "flash_attn": True, "verbose": False}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    # it has no option to ignore the end
    return ServerCommand([engine.python, "-m", "llama_cpp.server", *words], "/v1/models", {})


def _vllm_server(engine: PeerEngine, model: Path, threads: int, context: int) -> ServerCommand:
    command = [engine.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", engine.settings["dtype"]]
    command += ["--max-model-len", str(context), "--no-enable-prefix-caching", "--disable-log-stats"]
    return ServerCommand(command, "/health", {"ignore_eos": True}, vllm_environment(threads))


def _no_server(engine: PeerEngine, model: Path, threads: int, context: int) -> None:
    """`transformers serve` is not built for load. It runs a request at a time, and its streams end without [DONE]. On
    two cores it reached a tenth of the rate of the loop in `transformers_engine`; its continuous batching, which needs
    a GPU's attention, was slower still."""


def vllm_environment(threads: int) -> dict[str, str]:
    """Environment that its CPU build reads when it is imported. KV cache in GiB."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


MODULES = {OURS: "this_engine", "transformers": "transformers_engine", "llama.cpp": "llama_cpp_engine", "vLLM": "vllm_engine"}
SERVERS = {OURS: _this_server, "transformers": _no_server, "llama.cpp": _llama_cpp_server, "vLLM": _vllm_server}

ENGINES = (
    PeerEngine(OURS, "float32", 32, {"dtype": "float32", "weights": "dequantised"}),
    PeerEngine(OURS, "bfloat16", 16, {"dtype": "bfloat16", "weights": "dequantised"}),
    PeerEngine(OURS, "Q4_1", 4, {"dtype": "bfloat16", "weights": "auto"}),  # the file's own blocks
    PeerEngine(OURS, "int8", 8, {"weights": "int8"}),
    PeerEngine("transformers", "float32", 32, {"dtype": "float32"}, PARITY, "folder"),
    PeerEngine("transformers", "bfloat16", 16, {"dtype": "bfloat16"}, PARITY, "folder"),
    PeerEngine("llama.cpp", "Q4_1", 4, {}, LLAMA_CPP, "gguf"),
    PeerEngine(
        "llama.cpp", "BF16", 16, {}, LLAMA_CPP, "gguf BF16"
    ),  # the fastest of its float types where the processor multiplies it natively
    PeerEngine("vLLM", "bfloat16", 16, {"dtype": "bfloat16"}, VLLM, "folder", gives_logits=False),
)


def select_engines(names: Sequence[str], engines: Sequence[PeerEngine] = ENGINES) -> list[PeerEngine]:
    """The engines whose name begins with one of `names`, '-' for ' ' and in any case: 'jaxinfer', 'llama.cpp-q4_1'.
    Raises ValueError for a name without an engine."""
    if not names:
        return list(engines)
    wanted = [name.lower().replace("-", " ") for name in names]
    for name in wanted:
        if not any(engine.name.lower().startswith(name) for engine in engines):
            raise ValueError(f"no engine is called {name!r}: there are {', '.join(e.name.replace(' ', '-') for e in engines)}")
    return [engine for engine in engines if engine.name.lower().startswith(tuple(wanted))]
