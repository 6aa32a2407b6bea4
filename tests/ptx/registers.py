"""Registers and constants, as an instruction reads and writes them: 32 numbers, of 32 threads."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from tests.ptx.block import Warp

LANES = 32
GLOBAL, MAPS = 1 << 40, 1 << 44  # where global memory begins, and tensor maps
_FLOATS = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_INTEGERS = {
    f"{sign}{bits}": np.dtype(f"{kind}{bits // 8}") for sign, kind in (("u", "u"), ("s", "i"), ("b", "u")) for bits in (8, 16, 32, 64)
}
TYPES = _FLOATS | _INTEGERS
# Of registers by how their names begin; the first that fits.
_REGISTER = {"%rs": np.uint16, "%rd": np.uint64, "%r": np.uint32, "%p": np.bool_}

ALL = np.ones(LANES, bool)


def operands_of(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    if "[" not in text and "{" not in text:
        return [part.strip() for part in text.split(",")] if text.strip() else []
    found, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    return [*found, text[start:].strip()] if text.strip() else []


@functools.cache
def kind_of(register: str) -> Any:
    return next(kind for prefix, kind in _REGISTER.items() if register.startswith(prefix))


def _constant(text: str, dtype: np.dtype) -> np.ndarray:
    if text.startswith("0f"):
        bits = np.uint32(int(text[2:], 16))
        value = np.full(LANES, bits).view(np.float32)
        return value if dtype == np.float32 else value.view(dtype)
    number = int(text, 0)
    bits = np.array([number & (2 ** (8 * dtype.itemsize) - 1)], f"u{dtype.itemsize}")
    return np.repeat(bits.view(dtype), LANES)


def reader(text: str, dtype: np.dtype) -> Callable[[Warp], np.ndarray]:
    """Of a register or a constant, as this type."""
    if text.startswith("%"):
        if text in _SPECIAL:
            special = _SPECIAL[text]
            return lambda warp: special(warp).astype(dtype)
        if dtype == np.bool_:
            return lambda warp: warp.get(text)

        def read(warp: Warp) -> np.ndarray:
            value = warp.get(text)
            if value.dtype.itemsize == dtype.itemsize:
                return value.view(dtype)
            return value.astype(f"u{dtype.itemsize}").view(dtype)  # the lower part

        return read
    if re.match(r"^-?\d|^0[fx]", text):
        value = _constant(text, dtype)
        return lambda warp: value
    if "dynamic_shmem" in text:
        return lambda warp: np.zeros(LANES, dtype)
    if re.search(r"_param_\d+$", text):  # its address: of tensor maps alone
        return lambda warp: np.full(LANES, MAPS, dtype)
    raise ValueError(f"{text!r} is neither a register nor a constant")


_SPECIAL: dict[str, Callable[[Warp], np.ndarray]] = {
    "%tid.x": lambda warp: np.arange(LANES) + LANES * warp.index,
    **{f"%ctaid.{axis}": lambda warp, i=i: np.full(LANES, warp.block.place[i]) for i, axis in enumerate("xyz")},
    **{f"%nctaid.{axis}": lambda warp, i=i: np.full(LANES, warp.block.launch.grid[i]) for i, axis in enumerate("xyz")},
}


def write(warp: Warp, register: str, value: np.ndarray) -> None:
    if register != "_":
        kind = np.dtype(kind_of(register))
        if value.dtype != kind:
            if value.dtype == np.bool_ or value.dtype.itemsize < kind.itemsize:
                value = value.view(f"u{value.dtype.itemsize}").astype(kind)
            else:
                value = np.ascontiguousarray(value).view(kind)
        warp.registers[register] = value


def address_of(text: str) -> Callable[[Warp], np.ndarray]:
    inner = text.strip("[] ")
    base, _, offset = inner.partition("+")
    read = reader(base, np.dtype(np.uint64))
    number = int(offset or 0)
    return lambda warp: read(warp).astype(np.int64) + number


def braced(text: str) -> list[str]:
    return [name.strip() for name in text.strip("{} ").split(",")]


def write_masked(warp: Warp, register: str, value: np.ndarray, mask: np.ndarray) -> None:
    old = warp.registers.get(register)
    write(warp, register, value)
    if old is not None and not mask.all():
        warp.registers[register] = np.where(mask, warp.registers[register], old)
