"""A matrix of bfloat16 in 12 bits a value, without loss, in the order in which a CPU kernel reads it.

Its outputs are cut into panels of 16, and a panel's inputs into tiles of up to `MOST_STEPS` steps. A step has 64
values: of 16 outputs two inputs each, as `packed_matmul` has them, and then the next two. A tile begins with 64 bytes
of header: an exponent, the number of escapes, and up to 15 of these, each a place in the tile and a value. Then 96
bytes a step: the 64 values' signs and mantissas, and four bits for each one's exponent. 0 is the exponent 0 (zeros,
and numbers near it), others are what is to be added to the tile's. Values with other exponents are escapes. A step's
values lie in an `ORDER` in which a CPU interleaves their two bytes by one instruction.

    header    uint32: exponent | count << 16; then uint32 each: place | value << 16
    a step    uint8[64]: sign << 7 | mantissa; uint8[32]: code of byte i's value | code of byte i + 32's << 4
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Bool, Int, Shaped, UInt8, UInt16, UInt32

PackTiles = Callable[[UInt16[Array, "N V"]], UInt8[Array, "N B"]]

LANES, GROUP = 16, 4
STEP_VALUES = LANES * GROUP
STEP_BYTES = STEP_VALUES + STEP_VALUES // 2
HEADER_BYTES = 64
MOST_ESCAPES = HEADER_BYTES // 4 - 1
MOST_STEPS = 96  # of a tile: the fewer tiles, the fewer headers; places have to fit 16 bits
WINDOW = 15  # exponents that codes other than 0 stand for
# The value, in packed_matmul's order, of each of a step's bytes; and the byte of each value.
ORDER = np.array([32 * half + 8 * quarter + i for quarter in range(4) for half in range(2) for i in range(8)])
_BYTE_OF = np.argsort(ORDER)
_OF_LANE = np.array([[32 * half + 2 * lane + i for half in range(2) for i in range(2)] for lane in range(LANES)])
_MOST_OUTLIERS = 12  # exponents above the window that a tile may leave to escapes


def packs(num_outputs: int, num_inputs: int) -> bool:
    """Whether a matrix with so many outputs on its innermost axis of them, and so many inputs, can be packed."""
    return num_outputs % LANES == 0 and num_inputs % GROUP == 0


def tile_steps(num_inputs: int, num_shards: int = 1) -> int:
    """Steps of each tile: the most that divide each shard of the inputs, or all of them where shards don't."""
    steps = num_inputs // GROUP
    steps = steps if steps % num_shards else steps // num_shards
    return max(size for size in range(1, min(steps, MOST_STEPS) + 1) if steps % size == 0)


def tile_bytes(steps: int) -> int:
    return HEADER_BYTES + STEP_BYTES * steps


def pack(
    matrix: BFloat16[Array, "*O_and_I"], output_axes: int = 1, num_shards: int = 1, pack_tiles: PackTiles | None = None
) -> UInt8[Array, "*P K B"]:
    """A matrix [outputs..., inputs...] with `output_axes` axes of outputs, as tiles: [outputs... / 16, tiles of a
    panel, bytes of a tile]. Of the outputs only the innermost axis is cut; inputs are flat. `pack_tiles` is another
    way to do what this module's does. A tile with more than `MOST_ESCAPES` is of no use; `num_misfits` finds it.
    Raises `ValueError` for sizes that can't be cut, and types other than bfloat16."""
    outputs, num_inputs = matrix.shape[:output_axes], math.prod(matrix.shape[output_axes:])
    if matrix.dtype != jnp.bfloat16 or not packs(outputs[-1], num_inputs):
        raise ValueError(f"pack: {matrix.dtype}{matrix.shape} must be bfloat16, with outputs in multiples of {LANES} and inputs of {GROUP}")
    steps = tile_steps(num_inputs, num_shards)
    panels = (*outputs[:-1], outputs[-1] // LANES)
    cut = jnp.moveaxis(matrix.reshape(*panels, LANES, num_inputs // GROUP // steps, 2 * steps, 2), output_axes, -2)
    values = jax.lax.bitcast_convert_type(cut, jnp.uint16).reshape(-1, steps * STEP_VALUES)
    return (pack_tiles or pack_tiles_plainly)(values).reshape(*panels, -1, tile_bytes(steps))


def unpack(tiles: UInt8[Array, "*P K B"]) -> BFloat16[Array, "*O I"]:
    """The inverse of `pack`, with flat inputs."""
    *panels, num_tiles, _ = tiles.shape
    values = jax.lax.bitcast_convert_type(_tile_values(tiles, jnp.arange(STEP_VALUES)), jnp.bfloat16)
    cut = jnp.moveaxis(values.reshape(*panels, num_tiles, -1, LANES, 2), -2, -4)
    return cut.reshape(*panels[:-1], panels[-1] * LANES, -1)


def output_values(tiles: UInt8[Array, "T K B"], lanes: Int[Array, " T"]) -> BFloat16[Array, "T I"]:
    """Of each of T panels all inputs of one of its 16 outputs."""
    values = _tile_values(tiles, jnp.asarray(_OF_LANE)[lanes][:, None, :])
    return jax.lax.bitcast_convert_type(values, jnp.bfloat16).reshape(len(tiles), -1)


def num_misfits(tiles: UInt8[Array, "... B"]) -> Shaped[Array, ""]:
    """Tiles that have more escapes than there is room for."""
    return jnp.sum(_header(tiles)[..., 0] >> 16 > MOST_ESCAPES)


def _header(tiles: UInt8[Array, "... B"]) -> UInt32[Array, "... 16"]:
    return jax.lax.bitcast_convert_type(tiles[..., :HEADER_BYTES].reshape(*tiles.shape[:-1], -1, 4), jnp.uint32)


def _tile_values(tiles: UInt8[Array, "... B"], of_step: Int[Array, "... N"]) -> UInt16[Array, "... V"]:
    """The bits of these values of each step of each tile, step by step."""
    header = _header(tiles)
    steps = tiles[..., HEADER_BYTES:].reshape(*tiles.shape[:-1], -1, STEP_BYTES)
    at = jnp.asarray(_BYTE_OF)[of_step]
    at = jnp.broadcast_to(at[..., None, :], (*steps.shape[:-1], at.shape[-1]))
    signs = jnp.take_along_axis(steps, at, axis=-1).astype(jnp.uint16)
    pairs = jnp.take_along_axis(steps, STEP_VALUES + at % (STEP_VALUES // 2), axis=-1)
    codes = (pairs >> jnp.where(at < STEP_VALUES // 2, 0, 4).astype(jnp.uint8) & 15).astype(jnp.uint16)
    exponent = (header[..., 0] & 0xFF).astype(jnp.uint16)[..., None, None]
    exponents = jnp.where(codes == 0, 0, codes + exponent)
    values = ((signs & 0x80) << 8 | exponents << 7 | signs & 0x7F).reshape(*tiles.shape[:-1], -1)
    first = STEP_VALUES * jnp.arange(steps.shape[-2], dtype=jnp.uint32)[:, None]
    places = (first + of_step.astype(jnp.uint32)[..., None, :]).reshape(*of_step.shape[:-1], -1)
    for number in range(1, MOST_ESCAPES + 1):
        entry = header[..., number, None]
        is_escape = (number <= header[..., 0, None] >> 16) & (places == entry & 0xFFFF)
        values = jnp.where(is_escape, (entry >> 16).astype(jnp.uint16), values)
    return values


def pack_tiles_plainly(values: UInt16[Array, "N V"]) -> UInt8[Array, "N B"]:
    """Tiles of these bits, each of a step's values in `packed_matmul`'s order."""
    exponents = values >> 7 & 0xFF
    base = _base(exponents)[..., None]
    code = exponents.astype(jnp.int16) - base
    is_escape = (exponents != 0) & ((code < 1) | (code > WINDOW))
    codes = jnp.where(is_escape | (exponents == 0), 0, code).astype(jnp.uint16)
    steps = (len(values), -1, STEP_VALUES)
    signs = (values >> 8 & 0x80 | values & 0x7F).reshape(steps)
    low, high = jnp.split(codes.reshape(steps)[..., ORDER], 2, axis=-1)
    body = jnp.concatenate([signs[..., ORDER], low | high << 4], axis=-1).astype(jnp.uint8).reshape(len(values), -1)
    count = jnp.minimum(jnp.sum(is_escape, axis=-1, dtype=jnp.uint32), MOST_ESCAPES + 1)
    first = base[..., 0].astype(jnp.uint32) | count << 16
    header = jnp.concatenate([first[..., None], _escapes(values, is_escape)], axis=-1)
    return jnp.concatenate([jax.lax.bitcast_convert_type(header, jnp.uint8).reshape(len(values), HEADER_BYTES), body], axis=-1)


def _base(exponents: UInt16[Array, "... V"]) -> Shaped[Array, "..."]:
    """One less than the first exponent of each tile's window: of all windows near its largest exponent the one with the
    fewest escapes, int16."""
    of_values = exponents.astype(jnp.int16)
    largest = jnp.max(of_values, axis=-1)
    best, fewest = jnp.maximum(largest - WINDOW, 0), None
    for outliers in range(_MOST_OUTLIERS + 1):
        base = jnp.maximum(largest - WINDOW - outliers, 0)
        code = of_values - base[..., None]
        found = jnp.sum((of_values != 0) & ((code < 1) | (code > WINDOW)), axis=-1, dtype=jnp.int32)
        best = base if fewest is None else jnp.where(found < fewest, base, best)
        fewest = found if fewest is None else jnp.minimum(found, fewest)
    return best


def _escapes(values: UInt16[Array, "... V"], is_escape: Bool[Array, "... V"]) -> UInt32[Array, "... 15"]:
    """The first escapes of each tile, place | value << 16. One at a time: there are few, and none in most steps."""
    steps = (*values.shape[:-1], -1, STEP_VALUES)
    values, is_escape = values.reshape(steps), is_escape.reshape(steps)
    found = []
    for _ in range(MOST_ESCAPES):
        in_step = jnp.any(is_escape, axis=-1)
        step = jnp.argmax(in_step, axis=-1)[..., None, None]
        row = jnp.take_along_axis(is_escape, step, axis=-2)
        lane = jnp.argmax(row, axis=-1)[..., None]
        value = jnp.take_along_axis(jnp.take_along_axis(values, step, axis=-2), lane, axis=-1)
        place = (step * STEP_VALUES + lane).astype(jnp.uint32)
        found.append((place | value.astype(jnp.uint32) << 16)[..., 0, 0])
        number = jnp.arange(is_escape.shape[-2] * STEP_VALUES, dtype=jnp.uint32).reshape(is_escape.shape[-2:])
        is_escape = is_escape & (number != place)
    return jnp.stack(found, axis=-1)
