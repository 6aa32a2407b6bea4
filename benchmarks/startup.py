"""`python -m benchmarks.startup`: from a process's start to its first token, and weights from disk to device.

Each measurement is a process of its own. A start is cold with an empty cache of programs, then warm with what that left
there. Weights are read from a folder of Llama-3.1-8B's layer shapes with random values, which is written first and left
in --folder; its pages are dropped from the system's cache before each read. The disk's own rate is that of reading
the file past that cache in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from checkpoints.compression import compress
from checkpoints.user_folders import cache_folder

_START = """
import json, os, sys, time
began = float(os.environ["BEGAN"])
from jaxinfer import LLM, SamplingParams
imported = time.time()
shipped = {"programs": sys.argv[2], "programs_key": sys.argv[3]} if len(sys.argv) > 2 else {}
llm = LLM("default", kv_memory="256MiB", ready_when=sys.argv[1], **shipped)
ready = time.time()
llm.generate(["The capital of France is"], SamplingParams(max_tokens=1))
done, stats = time.time(), llm.engine.stats
llm.close()
print(json.dumps({"imports": imported - began, "weights": stats.load_seconds, "programs": stats.compile_seconds,
    "ready": ready - began, "first token": done - began}))
"""

_LOAD = """
import json, sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from checkpoints.hub import open_source
from jaxinfer.models.registry import config_of
from jaxinfer.weights.formats.registry import WEIGHT_FORMATS
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.load import load_weights, weight_bytes
from jaxinfer.weights.template import make_template
from sharding.mesh import make_mesh
from sharding.rules import TENSOR_PARALLEL
source = open_source(Path(sys.argv[1]))
template = make_template(config_of(source).on_devices(1), ModelWeightFormat(WEIGHT_FORMATS[sys.argv[2]](jnp.dtype(jnp.bfloat16))))
began = time.time()
weights = jax.block_until_ready(load_weights(template, source, make_mesh((0,)), TENSOR_PARALLEL))
seconds = time.time() - began
most = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"seconds": seconds, "beside": most - weight_bytes(weights)}))
"""

_BLOCK = 1 << 24


def run(code: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a process prints as JSON. Raises `RuntimeError` with its last words if it fails."""
    surroundings = os.environ | {"BEGAN": str(time.time())} | environment
    process = subprocess.run([sys.executable, "-c", code, *arguments], env=surroundings, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"a measured process failed: {process.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return found


def starts(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Of the default model, cold and warm by turns; with all programs, and with each role's largest bucket; and cold
    with programs that were shipped."""
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as shipped:
        folder, key = Path(shipped) / "programs", Path(shipped) / "key"
        key.write_bytes(os.urandom(32))
        command = [sys.executable, "-m", "server.cli", "compile", "--kv-memory=256MiB", f"--programs-key={key}", f"--output={folder}"]
        subprocess.run(command, check=True)
        for _ in range(rounds):
            _start_all(found, (str(folder), str(key)))
    return found


def _start_all(found: dict[str, list[dict[str, Any]]], shipped: tuple[str, str]) -> None:
    for kind, arguments in (("all", ("all",)), ("first", ("first",)), ("shipped", ("all", *shipped))):
        with tempfile.TemporaryDirectory() as home:
            (Path(home) / "jaxinfer").mkdir()
            (Path(home) / "jaxinfer" / "models").symlink_to(cache_folder() / "models")
            for state in ("cold", "warm")[: 1 if kind == "shipped" else 2]:
                name = {"all": state, "first": f"{state}, --ready-when first", "shipped": "cold, --programs"}[kind]
                found.setdefault(name, []).append(run(_START, *arguments, XDG_CACHE_HOME=home))


def write_model(folder: Path, num_layers: int) -> None:
    """A folder of Llama-3.1-8B's shapes, with as few layers as this."""
    hidden, wide, kv, vocabulary = 4096, 14336, 1024, 32000
    values = (np.random.default_rng(0).standard_normal(1 << 24, np.float32) / 64).astype(ml_dtypes.bfloat16)

    def matrix(outputs: int, inputs: int) -> np.ndarray:
        return np.resize(values, (outputs, inputs))

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "model.norm.weight": np.ones(hidden, values.dtype)}
    for layer in range(num_layers):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"model.layers.{layer}.{name}_layernorm.weight": np.ones(hidden, values.dtype) for name in ("input", "post_attention")}
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    config |= {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": num_layers, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "vocab_size": vocabulary, "max_position_embeddings": 8192, "rope_theta": 500000.0}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True, "torch_dtype": "bfloat16"}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop_from_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rate(file: Path) -> float:
    """Bytes a second of one reader, past the system's cache; a file system that has none is read as it is."""
    block = np.empty(_BLOCK + 4096, np.uint8)
    aligned = block[-block.ctypes.data % 4096 :][:_BLOCK]
    try:
        handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        handle = os.open(file, os.O_RDONLY)
    began, done = time.perf_counter(), 0
    try:
        while count := os.preadv(handle, [aligned.data], done):
            done += count
    finally:
        os.close(handle)
    return done / (time.perf_counter() - began)


def loads(folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Of the folder and its compressed form, in each format."""
    coded = folder.with_name(folder.name + "-compressed")
    if not coded.exists():
        compress(folder, coded)
    found: dict[str, list[dict[str, float]]] = {}
    num_bytes = (folder / "model.safetensors").stat().st_size
    for _ in range(rounds):
        rate = disk_rate(folder / "model.safetensors")
        for name, path, weights in (
            ("to bfloat16", folder, "packed"),
            ("to lossless", folder, "lossless"),
            ("compressed, to bfloat16", coded, "packed"),
        ):
            drop_from_cache(path)
            measured = run(_LOAD, str(path), weights)
            loaded = num_bytes / measured["seconds"]
            found.setdefault(name, []).append({"rate": loaded, "of disk": loaded / rate, "disk": rate, "beside": measured["beside"]})
    return found


def middle(values: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(value[key] for value in values)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=5, help="of the folder that is loaded: 436 MB each (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "jaxinfer-startup", help="default: %(default)s")
    options = parser.parse_args(arguments)
    console = Console()
    table = Table("start", "imports, s", "weights, s", "programs, s", "ready, s", "first token, s", title="the default model")
    for kind, of_kind in starts(options.rounds).items():
        table.add_row(kind, *(f"{middle(of_kind, key):.2f}" for key in ("imports", "weights", "programs", "ready", "first token")))
    console.print(table)
    folder = options.folder / f"{options.layers}-layers"
    if not folder.exists():
        write_model(folder, options.layers)
    table = Table("weights", "GB/s of bfloat16", "disk, GB/s", "of the disk's", "peak memory beside them", title="from disk to device")
    for name, of_one in loads(folder, options.rounds).items():
        rate, disk, share, beside = (middle(of_one, key) for key in ("rate", "disk", "of disk", "beside"))
        table.add_row(name, f"{rate / 1e9:.2f}", f"{disk / 1e9:.2f}", f"{share:.2f}", f"{beside / 1e6:.0f} MB")
    console.print(table)


if __name__ == "__main__":
    main()
