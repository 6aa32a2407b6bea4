"""How a matrix of bfloat16 lies in memory in 12 bits a value, without loss, in the order in which a CPU kernel reads it.

Its outputs are cut into panels of 16, and a panel's inputs into tiles of up to `MOST_STEPS` steps. A step has 32
values: of 16 outputs two inputs each, as `packed_matmul` has them. A tile begins with 64 bytes of header: an exponent,
the number of escapes, and up to 15 of these, each a place in the tile and a value. Then 48 bytes a step: the 32 values'
signs and mantissas, and four bits for each one's exponent. 0 is the exponent 0 (zeros, and numbers near it), others
are what is to be added to the tile's. Values with other exponents are escapes.

    header    uint32: exponent | count << 16; then uint32 each: place | value << 16
    a step    uint8[32]: sign << 7 | mantissa; uint8[16]: code of value i | code of value i + 16 << 4
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped, UInt8, UInt16, UInt32

LANES, GROUP = 16, 2
STEP_VALUES = LANES * GROUP
STEP_BYTES = STEP_VALUES + STEP_VALUES // 2
HEADER_BYTES = 64
MOST_ESCAPES = HEADER_BYTES // 4 - 1
MOST_STEPS = 192  # of a tile: the fewer tiles, the fewer headers; places have to fit 16 bits
WINDOW = 15  # exponents that codes other than 0 stand for
_MOST_OUTLIERS = 12  # exponents above the window that a tile may leave to escapes


def packs(num_outputs: int, num_inputs: int) -> bool:
    """Whether a matrix whose innermost axes of outputs and of inputs have these sizes can be packed."""
    return num_outputs % LANES == 0 and num_inputs % GROUP == 0


def tile_steps(num_inputs: int) -> int:
    """Steps of each tile: the most that divide the matrix."""
    steps = num_inputs // GROUP
    return max(size for size in range(1, min(steps, MOST_STEPS) + 1) if steps % size == 0)


def tile_bytes(num_inputs: int) -> int:
    return HEADER_BYTES + STEP_BYTES * tile_steps(num_inputs)


def pack(matrix: Shaped[Array, "*O I"], output_axes: int = 1) -> UInt8[Array, "*P K B"]:
    """A matrix [outputs..., inputs...] of bfloat16 with `output_axes` axes of outputs: [outputs... / 16, inputs... /
    inputs of a tile, bytes of a tile]. Only the innermost axis of each is cut. A tile with more than `MOST_ESCAPES`
    is of no use; `num_misfits` finds it. Raises `ValueError` for sizes that can't be cut."""
    outputs, inputs = matrix.shape[:output_axes], matrix.shape[output_axes:]
    if matrix.dtype != jnp.bfloat16 or not packs(outputs[-1], inputs[-1]):
        raise ValueError(f"pack: {matrix.dtype}{matrix.shape} must be bfloat16, with outputs in multiples of {LANES} and inputs in pairs")
    steps = tile_steps(inputs[-1])
    cut = matrix.reshape(*outputs[:-1], outputs[-1] // LANES, LANES, *inputs[:-1], inputs[-1] // GROUP // steps, steps, GROUP)
    tiles = jax.lax.bitcast_convert_type(jnp.moveaxis(cut, output_axes, -2), jnp.uint16)
    lead = tiles.shape[:-3]
    return _pack_tiles(tiles.reshape(*lead, steps * STEP_VALUES)).reshape(*lead, -1)


def unpack(tiles: UInt8[Array, "*P K B"], output_axes: int = 1) -> Shaped[Array, "*O I"]:
    """The inverse of `pack`: bfloat16."""
    values = jax.lax.bitcast_convert_type(tile_values(tiles), jnp.bfloat16)
    cut = jnp.moveaxis(values.reshape(*tiles.shape[:-1], -1, LANES, GROUP), -2, output_axes)
    outputs, inputs = cut.shape[: output_axes + 1], cut.shape[output_axes + 1 :]
    return cut.reshape(*outputs[:-2], outputs[-2] * LANES, *inputs[:-3], inputs[-3] * inputs[-2] * inputs[-1])


def num_misfits(tiles: UInt8[Array, "... B"]) -> Shaped[Array, ""]:
    """Tiles that have more escapes than there is room for."""
    return jnp.sum(_header(tiles)[..., 0] >> 16 > MOST_ESCAPES)


def _header(tiles: UInt8[Array, "... B"]) -> UInt32[Array, "... 16"]:
    return jax.lax.bitcast_convert_type(tiles[..., :HEADER_BYTES].reshape(*tiles.shape[:-1], -1, 4), jnp.uint32)


def tile_values(tiles: UInt8[Array, "... B"]) -> UInt16[Array, "... V"]:
    """The bits of all values of each tile, step by step."""
    header = _header(tiles)
    steps = tiles[..., HEADER_BYTES:].reshape(*tiles.shape[:-1], -1, STEP_BYTES).astype(jnp.uint16)
    signs, pairs = steps[..., :STEP_VALUES], steps[..., STEP_VALUES:]
    codes = jnp.concatenate([pairs & 15, pairs >> 4], axis=-1)
    exponent = (header[..., 0] & 0xFF).astype(jnp.uint16)[..., None, None]
    exponents = jnp.where(codes == 0, 0, codes + exponent)
    values = ((signs & 0x80) << 8 | exponents << 7 | signs & 0x7F).reshape(*tiles.shape[:-1], -1)
    places = jnp.arange(values.shape[-1], dtype=jnp.uint32)
    for number in range(1, MOST_ESCAPES + 1):
        entry = header[..., number, None]
        is_escape = (number <= header[..., 0, None] >> 16) & (places == entry & 0xFFFF)
        values = jnp.where(is_escape, (entry >> 16).astype(jnp.uint16), values)
    return values


def _pack_tiles(values: UInt16[Array, "... V"]) -> UInt8[Array, "... B"]:
    exponents = values >> 7 & 0xFF
    base = _base(exponents)[..., None]
    code = exponents.astype(jnp.int16) - base
    is_escape = (exponents != 0) & ((code < 1) | (code > WINDOW))
    codes = jnp.where(is_escape | (exponents == 0), 0, code).astype(jnp.uint16)
    steps = (*values.shape[:-1], -1, STEP_VALUES)
    signs = (values >> 8 & 0x80 | values & 0x7F).reshape(steps)
    low, high = jnp.split(codes.reshape(steps), 2, axis=-1)
    body = jnp.concatenate([signs, low | high << 4], axis=-1).astype(jnp.uint8).reshape(*values.shape[:-1], -1)
    count = jnp.minimum(jnp.sum(is_escape, axis=-1, dtype=jnp.uint32), MOST_ESCAPES + 1)
    first = base[..., 0].astype(jnp.uint32) | count << 16
    header = jnp.concatenate([first[..., None], _escapes(values, is_escape)], axis=-1)
    bytes_of_header = jax.lax.bitcast_convert_type(header, jnp.uint8).reshape(*values.shape[:-1], HEADER_BYTES)
    return jnp.concatenate([bytes_of_header, body], axis=-1)


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
