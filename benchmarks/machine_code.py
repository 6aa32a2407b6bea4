"""What NVIDIA's assembler makes of the GPU kernels: instructions of a tile, beside what a multiprocessor can do while
the tile is fetched.

    JAX_PLATFORMS=cpu python -m benchmarks.machine_code

Needs no GPU, only the extra `aot` (JAX's compiler, NVIDIA's assembler and disassembler). It compiles each kernel in the
size of a model for an H200. In the machine code it finds the shortest loop that multiplies and the shortest one that
starts copies: the work of one tile. A branch back over the end of the program is no loop: it returns from a wait whose
slow path lies behind all other code. Each of a multiprocessor's four schedulers starts at most one instruction a cycle,
of one warp of each warpgroup. A share near 1 means that instructions, not memory, bound the kernel; a small one says
nothing about latencies. No time is measured.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.gpu.grouped_matmul import weights as expert_weights
from benchmarks.gpu.roofline import DATASHEET
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES as EXPERTS
from pallas_kernels.grouped_matmul.formats import OUTPUTS
from pallas_kernels.grouped_matmul.mosaic_tiles import weight_tiles_for
from pallas_kernels.latent_prefill_attention import mosaic_gpu as latent_prefill_attention
from pallas_kernels.mosaic.card import HOPPER
from pallas_kernels.mosaic.warpgroup import ROWS
from pallas_kernels.paged_attention import mosaic_gpu as paged_attention
from pallas_kernels.paged_attention.mosaic_tiling import tiling_for as paged_tiling
from pallas_kernels.ragged_prefill_attention import mosaic_gpu as ragged_prefill_attention
from pallas_kernels.ragged_prefill_attention.mosaic_tile_work import TILE_ROWS, WARPGROUPS
from pallas_kernels.ragged_prefill_attention.mosaic_tile_work import tiling_for as ragged_tiling
from sharding.targets import target_devices

TARGET = "h200"
_PRODUCTS = 2048  # bfloat16 multiplications and additions that a multiprocessor's tensor cores do in a cycle
_BATCH, _CONTEXT, _PAGE = 32, 4096, 16


@dataclass(frozen=True)
class CompiledKernel:
    name: str
    kernel: str  # its name in the compiled program
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # shapes and types
    num_consumers: int  # warpgroups that each process every tile
    num_bytes: int  # fetched for a tile
    num_products: int  # multiplications and additions of a tile
    num_loops: int = 1  # of warpgroups that each process a tile differently


@dataclass(frozen=True)
class MachineCodeReport:
    case: CompiledKernel
    spilled: int  # bytes that are stored for lack of registers, anywhere in the kernel
    serialised: str  # ptxas's warning that wgmma instructions are serialised; empty without
    multiplying: tuple[int, ...]  # instructions of a warp a tile, in each loop
    copying: int

    @property
    def issued(self) -> int:
        """Instructions of each scheduler a tile."""
        return sum(self.multiplying) * self.case.num_consumers + self.copying

    @property
    def cycles(self) -> dict[str, float]:
        """Least cycles of a tile in memory and in tensor cores, by the datasheet."""
        rates = DATASHEET[TARGET]
        clock = rates.flops_per_s / (2 * _PRODUCTS * HOPPER.multiprocessors)
        memory = self.case.num_bytes / (rates.bytes_per_s / HOPPER.multiprocessors) * clock
        return {"memory": memory, "tensor cores": self.case.num_products / _PRODUCTS}

    @property
    def share(self) -> float:
        """Share of the time of the slower of the two."""
        return self.issued / max(self.cycles.values())


def _decode(
    name: str, dtype: str, heads: int, kv_heads: int, size: int, page: int = _PAGE, value_size: int | None = None
) -> CompiledKernel:
    # For latents one warpgroup has the scores, and each has half of the values' columns.
    sides, num_loops = (2, 1) if value_size is None else (1, 2)
    kind = {"is_latent": value_size is not None}
    tokens = paged_tiling(_BATCH, kv_heads, heads // kv_heads, size, page, _CONTEXT, jnp.dtype(dtype), **kind).tokens
    pages = _BATCH * _CONTEXT // page
    pool = (2, sides, pages, kv_heads, page, size)
    types = [((_BATCH, heads, size), "bfloat16"), (pool, dtype), ((), "int32"), ((_BATCH, pages // _BATCH), "int32"), ((_BATCH,), "int32")]
    if dtype != "bfloat16":
        types.append(((2, 2, kv_heads), "float32"))

    def attend(*arguments: Any) -> Any:
        options = {"scale": size**-0.5, "pool_is_finite": True, "value_size": value_size}
        return paged_attention.paged_attention(*arguments[:5], **options, kv_scales=arguments[5] if len(arguments) > 5 else None)

    num_bytes = sides * tokens * size * jnp.dtype(dtype).itemsize
    products = ROWS * tokens * (size + (value_size or size))
    return CompiledKernel(name, "paged_attention", attend, _shapes(types), 1, num_bytes, products, num_loops)


def _prefill(num_tokens: int = 8192) -> CompiledKernel:
    heads, kv_heads, size, one = 32, 8, 128, ((1,), "int32")
    pool = (2, 2, num_tokens // _PAGE, kv_heads, _PAGE, size)
    types = [((num_tokens, heads, size), "bfloat16"), (pool, "bfloat16"), ((), "int32"), ((1, num_tokens // _PAGE), "int32"), one, one, one]

    def attend(*arguments: Any) -> Any:
        options = {"scale": size**-0.5, "query_tile": TILE_ROWS, "pool_is_finite": True}
        return ragged_prefill_attention.ragged_prefill_attention(*arguments, **options)

    products = 2 * TILE_ROWS * ragged_tiling(heads // kv_heads, size, size, HOPPER).tokens * size
    # Tiles of a prompt were read by another block just before: they come from the cache.
    return CompiledKernel("prefill attention", "ragged_prefill_attention", attend, _shapes(types), WARPGROUPS, 0, products)


def _prefill_of_latents(num_tokens: int = 8192) -> CompiledKernel:
    heads, rank, own, shared, one = 16, 512, 128, 64, ((1,), "int32")
    pool = (2, 1, num_tokens // _PAGE, 1, _PAGE, rank + shared)
    types = [
        ((num_tokens, heads, own + shared), "bfloat16"),
        (pool, "bfloat16"),
        ((), "int32"),
        ((1, num_tokens // _PAGE), "int32"),
        one,
        one,
        one,
    ]

    def attend(*arguments: Any) -> Any:
        options = {"scale": (own + shared) ** -0.5, "query_tile": TILE_ROWS, "pool_is_finite": True}
        return latent_prefill_attention.latent_prefill_attention(*arguments, **options)

    products = TILE_ROWS * ragged_tiling(1, own + shared, own, HOPPER).tokens * (2 * own + shared)
    arguments = _shapes([*types, ((rank, heads, 2 * own), "bfloat16")])
    return CompiledKernel("prefill attention, latents", "ragged_prefill_attention", attend, arguments, WARPGROUPS, 0, products)


def _experts(name: str, num_tokens: int = 64) -> CompiledKernel:
    case = next(case for case in EXPERTS if case.name == name)
    weights = jax.eval_shape(lambda: expert_weights(case, 0))
    rows = num_tokens * case.experts_per_token
    tiling = grouped_matmul.tiling_for(rows, weights)
    tiles = weight_tiles_for(weights, tiling.rows)
    # rows come from the cache
    num_bytes = sum(int(np.prod(shape)) * jnp.dtype(dtype).itemsize for shape, dtype in tiles.shapes)
    products = OUTPUTS * tiles.step * tiling.rows
    arguments = *_shapes([((rows, case.inputs), "bfloat16")]), weights, *_shapes([((case.num_experts,), "int32")])
    whose = "experts'" if case.num_experts > 1 else "a linear layer's"
    return CompiledKernel(
        f"{whose} products, {case.format}", "grouped_matmul", grouped_matmul.grouped_matmul, arguments, 2, num_bytes, products
    )


# Llama-3.1-8B's attention, attention over DeepSeek-V3's and Kimi's latents with the heads of one of eight GPUs, and
# experts of a few rows each.
CASES: dict[str, Callable[[], CompiledKernel]] = {
    "decode bfloat16": partial(_decode, "decode attention, bfloat16", "bfloat16", 32, 8, 128),
    "decode float8": partial(_decode, "decode attention, float8", "float8_e4m3fn", 32, 8, 128),
    "decode latents": partial(_decode, "decode attention, latents", "bfloat16", 16, 1, 576, 64, 512),
    "prefill": _prefill,
    "prefill latents": _prefill_of_latents,
    "experts bfloat16": partial(_experts, "llama-4-scout"),
    "experts fp8": partial(_experts, "deepseek-v3"),
    "experts int4": partial(_experts, "kimi-k2.5"),
    "linear lossless": partial(_experts, "llama-3.1-8b", num_tokens=8),
}


def _shapes(types: list[tuple[tuple[int, ...], str]]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in types)


def inspect_kernel(case: CompiledKernel) -> MachineCodeReport:
    """Compiles a kernel and reads its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        dump(case.function, case.arguments, TARGET, Path(folder))
        texts = [path.read_text() for path in Path(folder).glob("*.ptx")]
        ptx.write_text(next(text for text in texts if re.search(rf"\.entry {case.kernel}", text)))
        said = _run("ptxas", "-v", "-O3", "--gpu-name", "sm_90a", str(ptx), "-o", str(cubin))
        code = _run("nvdisasm", "-c", str(cubin))
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled, said
    loops = find_loops(code)
    warning = re.search(r"^.*wgmma.*serializ.*$", said, re.MULTILINE | re.IGNORECASE)
    return MachineCodeReport(
        case, int(spilled[1]), warning[0] if warning else "", _shortest(loops, "HGMMA", case.num_loops), *_shortest(loops, "UTMALDG", 1)
    )


def dump(function: Callable[..., Any], arguments: Sequence[Any], target: str, folder: Path) -> str:
    """Compiles a function of such arguments for a GPU. JAX dumps the PTX of each kernel and its earlier forms in this
    folder, except for a kernel that this process compiled before. Returns the text of the compiled program."""
    mesh = Mesh(np.array(target_devices(target, 1)), ("x",), axis_types=(AxisType.Explicit,))
    whole = NamedSharding(mesh, PartitionSpec())
    abstract = jax.tree.map(lambda of: jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=whole), arguments)
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    try:
        with jax.set_mesh(mesh):
            lowered = jax.jit(function).lower(*abstract)
            lowered.compile()
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]
    return lowered.as_text()


def _run(tool: str, *arguments: str) -> str:
    """The output of one of NVIDIA's tools."""
    spec = importlib.util.find_spec("nvidia.cu13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("NVIDIA's assembler is not installed: it is part of the extra `aot`")
    path = Path(next(iter(spec.submodule_search_locations))) / "bin" / tool
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def find_loops(code: str) -> list[list[str]]:
    """Instructions of each loop of a disassembled kernel: those between a label and a branch back to it. Two kinds are
    left out. The slow paths of waits lie behind the kernel's ends and branch back over them; between such a branch and
    its label is an `EXIT`. And arithmetic that a branch inside a loop skips runs only for the tiles at a context's
    ends."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(instruction[1])
            if (branch := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction[1])) and branch[1] in labels:
                loops.append((labels[branch[1]], len(instructions)))
    bodies = [(instructions[begin:end], begin) for begin, end in loops]
    return [_without_detours(body, begin, labels) for body, begin in bodies if not any("EXIT" in each for each in body)]


def _without_detours(loop: list[str], begin: int, labels: dict[str, int]) -> list[str]:
    kept, place = [], 0
    while place < len(loop):
        kept.append(loop[place])
        branch = re.match(r"@!?U?P\d BRA `\((\.L_x_\d+)\)", loop[place])
        end = labels[branch[1]] - begin if branch else 0
        is_arithmetic = not any(re.search("HGMMA|UTMALDG|SYNCS|BAR|BRA", each) for each in loop[place + 1 : end])
        place = end if place < end <= len(loop) and is_arithmetic else place + 1
    return kept


def _shortest(loops: list[list[str]], operation: str, number: int) -> tuple[int, ...]:
    """Lengths of the `number` shortest loops, the longest first."""
    lengths = sorted(len(loop) for loop in loops if any(operation in instruction for instruction in loop))
    return tuple(reversed(lengths[:number]))


def main() -> None:
    print(f"| for an {TARGET.upper()} | multiplying | copying | issued | memory | tensor cores | issued, of the slower | spilled |")
    print("|---|---|---|---|---|---|---|---|")
    for make in CASES.values():
        case = make()
        one = inspect_kernel(case)
        cycles = " | ".join(f"{cycles:,.0f}" if cycles else "-" for cycles in one.cycles.values())
        multiplying = " and ".join(map(str, one.multiplying))
        print(f"| {case.name} | {multiplying} | {one.copying} | {one.issued} | {cycles} | {one.share:.0%} | {one.spilled} bytes |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
