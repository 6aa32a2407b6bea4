"""What warps' instructions do with registers, as PTX's manual has it (ISA 9.0, sections 9.7.14.5 and 9.7.15). A register is [..., 32 threads], or
[..., 32, 2] where it holds two numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def matrix_of(rows: np.ndarray, *, is_transposed: bool) -> np.ndarray:
    """ldmatrix: of an 8 x 8 matrix [..., 8, 8] thread 4 r + c gets row r, columns 2 c and 2 c + 1, or of its transpose."""
    matrix = rows.swapaxes(-1, -2) if is_transposed else rows
    return matrix.reshape(*rows.shape[:-2], 32, 2)


def product(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> list[np.ndarray]:
    """mma.m16n8k16: a[16, 16] @ b[16, 8] in float32, of 4 and 2 registers of two numbers, in 4 of one."""
    lead = a[0].shape[:-2]
    left = np.empty((*lead, 16, 16), np.float32)
    for i, register in enumerate(a):  # upper left, lower left, upper right, lower right
        left[..., i % 2 * 8 : i % 2 * 8 + 8, i // 2 * 8 : i // 2 * 8 + 8] = register.reshape(*lead, 8, 8)
    # Of b a thread has two rows of one column.
    right = np.concatenate([register.reshape(*lead, 8, 8).swapaxes(-1, -2).astype(np.float32) for register in b], axis=-2)
    sums = left @ right  # [..., 16, 8]
    halves = (sums[..., 8 * i : 8 * i + 8, :].reshape(*lead, 32, 2) for i in range(2))
    return [half[..., j] for half in halves for j in range(2)]


def described_places(descriptor: int, rows: int, *, is_transposed: bool) -> np.ndarray:
    """Where the bytes of wgmma's matrix of 16-bit numbers are in shared memory, [rows, 16, 2], by its descriptor; where it is transposed numbers of
    a column follow one another."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    swizzle = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
    row, column = np.indices((rows, 16))
    if is_transposed:
        inner = swizzle // 2
        place = row % inner * 2 + row // inner * leading + column % 8 * swizzle + column // 8 * stride
    else:
        place = row % 8 * swizzle + row // 8 * stride + column * 2
    place = start + place
    place ^= place >> 3 & swizzle - 16
    return place[..., None] + np.arange(2)
