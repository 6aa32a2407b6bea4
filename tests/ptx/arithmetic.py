"""Instructions of a thread by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.block import Step, Warp
from tests.ptx.registers import LANES, TYPES, braced, reader, write


def arithmetic(parts: list[str], operands: list[str]) -> Step:
    name, kind = parts[0], parts[-1]
    if name in ("mov", "cvta"):
        return _move_registers(kind, operands)
    if name == "cvt":
        return _convert(parts, operands)
    if name == "setp":
        compare = _COMPARISONS[parts[1]]
        a, b = (reader(text, TYPES[kind]) for text in operands[1:])
        return lambda warp: write(warp, operands[0], compare(a(warp), b(warp)))
    if name == "selp":
        a, b = (reader(text, TYPES[kind]) for text in operands[1:3])
        return lambda warp: write(warp, operands[0], np.where(warp.get(operands[3]), a(warp), b(warp)))
    if kind == "pred":
        readers = [reader(text, np.dtype(bool)) for text in operands[1:]]
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[name]
        return lambda warp: write(warp, operands[0], combine(*(read(warp) for read in readers)))
    if kind.endswith("x2"):  # pairs
        dtype = TYPES[kind[:-2]]
        whole = np.dtype(f"u{2 * dtype.itemsize}")
        pairs = [reader(text, whole) for text in operands[1:]]
        operate = _OPERATIONS[name]
        return lambda warp: write(
            warp,
            operands[0],
            np.ascontiguousarray(operate(*(np.ascontiguousarray(r(warp)).view(dtype) for r in pairs)).astype(dtype)).view(whole),
        )
    dtype = TYPES[kind]
    readers = [reader(text, dtype) for text in operands[1:]]
    if name in ("shl", "shr"):
        readers[1] = reader(operands[2], np.dtype(np.uint32))
    if name == "bfe":
        readers[1:] = [reader(text, np.dtype(np.uint32)) for text in operands[2:]]
    if name in ("mul", "mad") and parts[1] in ("wide", "hi", "lo"):
        return _products(parts, operands, readers, dtype)
    if name == "lop3":
        table = int(operands[4], 0)
        return lambda warp: write(warp, operands[0], _lookup(table, *(read(warp) for read in readers[:3])))
    operate = (
        {"max": np.fmax, "min": np.fmin}[name] if name in ("max", "min") and dtype.kind == "f" and "NaN" not in parts else _OPERATIONS[name]
    )
    return lambda warp: write(warp, operands[0], operate(*(read(warp) for read in readers)).astype(dtype))


def _shift_right(value: np.ndarray, by: np.ndarray) -> np.ndarray:
    return value >> np.minimum(by, 8 * value.dtype.itemsize - 1).astype(value.dtype)


def _field(value: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    bits = 8 * value.dtype.itemsize
    left = (bits - start.astype(np.int64) - length.astype(np.int64)).astype(value.dtype)
    return (value << left) >> (left + start.astype(value.dtype))


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = np.stack([a, b], axis=1).view(np.uint8).reshape(LANES, 8)
    nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 7
    return np.ascontiguousarray(np.take_along_axis(both, nibbles.astype(np.int64), axis=1)).view(np.uint32).reshape(LANES)


def _lookup(table: int, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    found = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.divide(a, b) if a.dtype.kind == "f" else np.trunc(a / b),
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype),
    "neg": np.negative,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": lambda value, by: np.where(by < 8 * value.dtype.itemsize, value << by.astype(value.dtype), 0),
    "shr": _shift_right,
    "bfe": _field,
    "prmt": _permute,
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}


_COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),  # NaN is not even different; to `neu` it is
    "neu": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _products(parts: list[str], operands: list[str], readers: list[Any], dtype: np.dtype) -> Step:
    which = parts[1]
    bits = 8 * dtype.itemsize
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if bits < 64 else np.dtype(object)
    if which == "wide" and len(operands) > 3:
        readers[2] = reader(operands[3], wide)

    def multiply(warp: Warp) -> None:
        a, b = (read(warp).astype(wide) for read in readers[:2])
        value = a * b
        if which == "hi":
            value = (value >> bits).astype(dtype)
        elif which == "lo":
            value = (value & (2**bits - 1)).astype(f"u{dtype.itemsize}").view(dtype)
        if len(readers) > 2:
            value = value + readers[2](warp)
        write(warp, operands[0], value)

    return multiply


def _move_registers(kind: str, operands: list[str]) -> Step:
    if operands[0].startswith("{"):
        targets = braced(operands[0])
        whole = TYPES[kind]
        read, part = reader(operands[1], whole), np.dtype(f"u{whole.itemsize // len(targets)}")

        def unpack(warp: Warp) -> None:
            for i, target in enumerate(targets):
                write(warp, target, np.ascontiguousarray(np.ascontiguousarray(read(warp)).view(part).reshape(LANES, -1)[:, i]))

        return unpack
    if operands[1].startswith("{"):
        sources = braced(operands[1])
        whole = TYPES[kind]
        part = np.dtype(f"u{whole.itemsize // len(sources)}")
        readers = [reader(name, part) for name in sources]
        return lambda warp: write(warp, operands[0], np.stack([read(warp) for read in readers], axis=1).view(whole).reshape(LANES))
    if kind == "pred":
        read = reader(operands[1], np.dtype(bool))
        return lambda warp: write(warp, operands[0], read(warp))
    read = reader(operands[1], TYPES[kind])
    return lambda warp: write(warp, operands[0], read(warp))


def _convert(parts: list[str], operands: list[str]) -> Step:
    to, of = parts[-2:]
    if to.endswith("x2") and of.endswith("x2"):
        source, target = TYPES[of[:-2]], TYPES[to[:-2]]
        read = reader(operands[1], np.dtype(f"u{2 * source.itemsize}"))

        def convert_pair(warp: Warp) -> None:
            pair = np.ascontiguousarray(read(warp)).view(source).astype(target)
            write(warp, operands[0], pair.view(f"u{2 * target.itemsize}"))

        return convert_pair
    if to.endswith("x2"):
        target = TYPES[to[:-2]]
        high, low = (reader(text, TYPES[of]) for text in operands[1:3])
        whole = np.dtype(f"u{2 * target.itemsize}")
        return lambda warp: write(warp, operands[0], np.stack([low(warp), high(warp)], axis=1).astype(target).view(whole).reshape(LANES))
    read = reader(operands[1], TYPES[of])
    return lambda warp: write(warp, operands[0], read(warp).astype(TYPES[to]))
