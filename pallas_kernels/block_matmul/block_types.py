"""The block formats that `block_matmul` multiplies, of GGUF files and others: what a value is made of, and where it
lies.

A row's values come in blocks of 32 or 256. A block has a half precision scale, perhaps a minimum, and a code of 4, 5, 6
or 8 bits a value. The larger blocks' groups also have small integers by which scale and minimum are multiplied:

    value = scale * factor * (code - zero)    or    scale * factor * code + minimum * -factor of the minimum

Integers of 4 bits in groups (compressed-tensors, GPTQ, AWQ) are such blocks too, one a group: a scale, perhaps the zero
of the group, and its codes. `checkpoints/int4_tensors.py` reads them so.

All of that is exact in float32 up to the last sum, so the values are those of any other reader. The layouts are ggml's
(https://github.com/ggml-org/ggml, ggml-common.h, MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float16, Int, UInt8

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockType:
    name: str  # GGUF's
    size: int  # values of a block
    bits: int  # of a code; 8: signed
    num_bytes: int  # of a block in a file
    zero: int = 0  # the code of 0
    group: int = 32  # values that share a factor
    has_minimum: bool = False
    has_factors: bool = False
    values: tuple[int, ...] = ()  # what codes stand for, if not for themselves
    scale_type: str = "float16"  # or bfloat16
    has_zeros: bool = False  # each block its own: a minimum that is the scale, times a factor of it

    @property
    def groups(self) -> int:
        """Of a block."""
        return self.size // self.group


BLOCK_TYPES: Mapping[str, BlockType] = {
    one.name: one
    for one in (
        BlockType("Q4_0", 32, 4, 18, zero=8),
        BlockType("Q4_1", 32, 4, 20, has_minimum=True),
        BlockType("Q5_0", 32, 5, 22, zero=16),
        BlockType("Q5_1", 32, 5, 24, has_minimum=True),
        BlockType("Q8_0", 32, 8, 34),
        BlockType("IQ4_NL", 32, 4, 18, values=IQ4_NL_VALUES),
        BlockType("Q4_K", 256, 4, 144, has_minimum=True, has_factors=True),
        BlockType("Q5_K", 256, 5, 176, has_minimum=True, has_factors=True),
        BlockType("Q6_K", 256, 6, 210, zero=32, group=16, has_factors=True),
        *(BlockType(f"INT4 {name}", 32, 4, 18, zero=8, scale_type=of) for name, of in (("F16", "float16"), ("BF16", "bfloat16"))),
        *(
            BlockType(f"INT4 zero {size} {name}", size, 4, 3 + size // 2, has_minimum=True, has_factors=True, scale_type=of, has_zeros=True)
            for size in (32, 64, 128)
            for name, of in (("F16", "float16"), ("BF16", "bfloat16"))
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """The contents of blocks `[...]`, as their type has them."""

    codes: UInt8[Array, "... V"]
    scale: Float16[Array, "..."]
    minimum: Float16[Array, "..."] | None = None
    factors: UInt8[Array, "... G"] | None = None  # int8 for Q6_K, as bits
    minimum_factors: UInt8[Array, "... G"] | None = None


def read_blocks(kind: BlockType, stored: UInt8[Array, "... B"]) -> Blocks:
    """The contents of a file's blocks."""
    if kind.name == "Q6_K":
        low, high, factors, scale = jnp.split(stored, (128, 192, 208), axis=-1)
        # of each half of the block: 64 bytes of lower nibbles, then upper ones; 32 bytes of two bits, for each quarter
        low = _nibbles(low.reshape(*low.shape[:-1], 2, 64))
        high = _fields(high.reshape(*high.shape[:-1], 2, 32), 2)
        codes = (low | high << 4).reshape(*stored.shape[:-1], 256)
        return Blocks(codes, _half(scale), factors=factors)
    if kind.has_zeros:
        scale, zero, rest = stored[..., :2], stored[..., 2:3], stored[..., 3:]
        codes = _nibbles(rest.reshape(*rest.shape[:-1], -1, 16)).reshape(*rest.shape[:-1], kind.size)
        zeros = jnp.broadcast_to(zero, (*zero.shape[:-1], kind.groups))
        of_scale = _half(scale, kind)
        return Blocks(codes, of_scale, of_scale, jnp.ones_like(zeros), zeros)
    if kind.has_factors:
        scales, minima, packed, rest = jnp.split(stored, (2, 4, 16), axis=-1)
        rest = rest.reshape(*rest.shape[:-1], -1, 32)
        low = rest[..., 1:, :] if kind.bits == 5 else rest
        codes = _nibbles(low).reshape(*low.shape[:-2], 8, 32)
        if kind.bits == 5:
            codes |= _fields(rest[..., 0, :], 1).reshape(codes.shape) << 4
        factors, minimum_factors = _factors(packed)
        return Blocks(codes.reshape(*stored.shape[:-1], 256), _half(scales), _half(minima), factors, minimum_factors)
    scale, rest = _half(stored[..., :2], kind), stored[..., 2:]
    minimum = None
    if kind.has_minimum:
        minimum, rest = _half(rest[..., :2]), rest[..., 2:]
    if kind.bits == 8:
        return Blocks(rest, scale)
    if kind.bits == 4:
        return Blocks(_nibbles(rest), scale, minimum)
    high, low = rest[..., :4], rest[..., 4:]
    codes = _nibbles(low)
    codes |= ((high[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1).reshape(codes.shape) << 4
    return Blocks(codes, scale, minimum)


def values_of(kind: BlockType, blocks: Blocks) -> Array:
    """float32 [..., V]."""
    scale = blocks.scale.astype(jnp.float32)[..., None]
    minimum = None if blocks.minimum is None else blocks.minimum.astype(jnp.float32)[..., None]
    if blocks.factors is not None:
        scale *= _signed(blocks.factors) if kind.zero else blocks.factors.astype(jnp.float32)
    if minimum is not None and blocks.minimum_factors is not None:
        minimum *= -blocks.minimum_factors.astype(jnp.float32)
    codes = blocks.codes.reshape(*blocks.codes.shape[:-1], -1, kind.group)
    if kind.values:
        numbers = jnp.asarray(kind.values, jnp.float32)[codes]
    else:
        numbers = _signed(codes) if kind.bits == 8 else codes.astype(jnp.float32) - kind.zero
    values = scale[..., None] * numbers
    return (values if minimum is None else values + minimum[..., None]).reshape(blocks.codes.shape)


def _signed(values: UInt8[Array, "..."]) -> Array:
    return jax.lax.bitcast_convert_type(values, jnp.int8).astype(jnp.float32)


def _half(stored: UInt8[Array, "... 2"], kind: BlockType | None = None) -> Array:
    return jax.lax.bitcast_convert_type(stored, jnp.float16 if kind is None else jnp.dtype(kind.scale_type))


def _nibbles(stored: UInt8[Array, "... N"]) -> UInt8[Array, "... M"]:
    """Lower nibbles, then upper ones."""
    return jnp.concatenate([stored & 15, stored >> 4], axis=-1)


def _fields(stored: UInt8[Array, "... N"], bits: int) -> UInt8[Array, "... M"]:
    """The lowest bits of all bytes, then the next ones."""
    return jnp.concatenate([stored >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], axis=-1)


def _factors(packed: UInt8[Array, "... 12"]) -> tuple[Int[Array, "... 8"], Int[Array, "... 8"]]:
    """Eight factors of scales and eight of minima, of six bits each. The last four of each have their upper two bits
    above the first four's."""
    scale, minimum, both = jnp.split(packed, 3, axis=-1)
    of_scale = jnp.concatenate([scale & 63, both & 15 | scale >> 2 & 48], axis=-1)
    return of_scale, jnp.concatenate([minimum & 63, both >> 4 | minimum >> 2 & 48], axis=-1)
