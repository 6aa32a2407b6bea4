"""The part of the kernel's code that expands codes: from a group's bits to what a product reads.

Two values of each of 16 outputs lie in a word at the same place of its halves. Shifted into the mantissa of a power of
two, a code is an integer as bfloat16 has it, with that power added. Codes of 8 bits are converted, and those that
stand for other values looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.block_matmul.block_types import BlockType
from pallas_kernels.block_matmul.layout import LANES, group_bytes, header_bytes, tile_bytes, words_of_group
from pallas_kernels.llvm.host import HostTarget
from pallas_kernels.packed_matmul.llvm_ir import Kind

Number = Kind | Literal["int16"]  # of rows; integers are two of 8 bits each, with a unit for each row
# Of as many inputs as a word has codes: the order in which the integer kernel has them, four to a step. It is that of
# the bytes which shifts and masks make of a word.
INPUT_ORDER = {False: (0, 4, 1, 5, 2, 6, 3, 7), True: (0, 2, 1, 3)}  # of 4 to 6 bits; of 8 bits
PART_BYTES = 4096  # expanded of each panel at once
_BYTES_AHEAD = 2048  # of each panel, from what is read to what is prefetched
SCALE_BYTES = 2 * 4 * LANES  # of a group: its scales, and what is added for each sum of inputs


@dataclass(frozen=True, slots=True)
class NumberCode:
    """A type of blocks, and of the numbers that their codes become."""

    kind: BlockType
    number: Number
    target: HostTarget

    @property
    def is_integer(self) -> bool:
        return self.number == "int16"

    @property
    def has_sums(self) -> bool:
        """Whether the product needs the sums of inputs."""
        return self.is_integer or has_offset(self.kind)

    @property
    def has_added(self) -> bool:
        """Whether sums are multiplied by a number of the group."""
        return self.kind.has_minimum if self.is_integer else has_offset(self.kind)

    @property
    def offset(self) -> int:
        """What expanded codes have added."""
        if self.is_integer:
            return 128 if self.kind.bits == 8 or self.kind.values else 0
        return 1 << self.kind.bits if has_offset(self.kind) else 0

    @property
    def step_bytes(self) -> int:
        """Of a row's inputs in a step."""
        return 8 if self.is_integer else 4

    @property
    def pairs(self) -> int:
        """Of a group's values."""
        return self.kind.group // 2

    @property
    def steps(self) -> int:
        """Of a group: as many inputs as 64 bytes of a panel have."""
        return {"bfloat16": self.pairs, "float32": self.kind.group, "int16": self.kind.group // 4}[self.number]

    @property
    def expanded_bytes(self) -> int:
        """Of a group of a panel."""
        return 64 * self.steps

    @property
    def groups_at_once(self) -> int:
        return PART_BYTES // self.expanded_bytes


def has_offset(kind: BlockType) -> bool:
    """Whether its product needs the sums of inputs."""
    return kind.bits < 8 and not kind.values


def multiplied(a: str, b: str, c: str) -> str:
    return f"call <16 x float> @llvm.fmuladd.v16f32(<16 x float> {a}, <16 x float> {b}, <16 x float> {c})"


def expand(code: NumberCode) -> str:
    """Some groups of a panel: the numbers that codes stand for, step by step, and scales."""
    kind = code.kind
    return f"""
define internal void @expand(ptr %panel, i64 %from, i64 %count, ptr %out, ptr %out_scales) {{
entry:
  br label %group
group:
  %k = phi i64 [0, %entry], [%k_next, %group]
  %g = add i64 %from, %k
  %tile = udiv i64 %g, {kind.groups}
  %sub = urem i64 %g, {kind.groups}
  %tile_off = mul i64 %tile, {tile_bytes(kind)}
  %at_tile = getelementptr i8, ptr %panel, i64 %tile_off
  %codes_off0 = mul i64 %sub, {group_bytes(kind)}
  %codes_off = add i64 %codes_off0, {header_bytes(kind)}
  %at_codes = getelementptr i8, ptr %at_tile, i64 %codes_off
{prefetches(code)}
  %scales_off = mul i64 %k, {SCALE_BYTES}
  %at_scales = getelementptr i8, ptr %out_scales, i64 %scales_off
{_stored_scales(code)}
  %out_off = mul i64 %k, {code.expanded_bytes}
  %at_out = getelementptr i8, ptr %out, i64 %out_off
{_numbers(code)}
  %k_next = add i64 %k, 1
  %more = icmp ult i64 %k_next, %count
  br i1 %more, label %group, label %end
end:
  ret void
}}"""


def prefetches(code: NumberCode) -> str:
    """Of what comes after %at_codes, as many bytes as a group has."""
    size = group_bytes(code.kind) + header_bytes(code.kind) // code.kind.groups
    lines = []
    for number, at in enumerate(range(0, size, 64)):
        lines += [
            f"  %ahead{number} = getelementptr i8, ptr %at_codes, i64 {_BYTES_AHEAD + at}",
            f"  call void @llvm.prefetch.p0(ptr %ahead{number}, i32 0, i32 3, i32 1)",
        ]
    return "\n".join(lines)


def scales(code: NumberCode) -> tuple[list[str], str, str | None]:
    """Of a group of the tile at %at_tile, the one of number %sub: its scales, and what sums are multiplied by."""
    kind = code.kind
    of_halves = 2 * LANES * (1 + kind.has_minimum)
    lines = _widened("d", "%at_tile", kind)
    if kind.has_minimum:
        lines += [f"  %at_m = getelementptr i8, ptr %at_tile, i64 {2 * LANES}", *_widened("m", "%at_m", kind)]
    scale, minimum = "%d", "%m"
    if kind.has_factors:
        lines += [f"  %f_off0 = mul i64 %sub, {LANES}", *_factor("f", of_halves, "sitofp" if kind.zero else "uitofp")]
        lines += ["  %s = fmul <16 x float> %d, %f"]
        scale = "%s"
        if kind.has_minimum:
            lines += [f"  %fm_off0 = mul i64 %sub, {LANES}", *_factor("fm", of_halves + LANES * kind.groups, "uitofp")]
            lines += ["  %positive = fmul <16 x float> %m, %fm", "  %less = fneg <16 x float> %positive"]
            minimum = "%less"
    if not code.has_added:
        return lines, scale, None
    if code.is_integer:
        return lines, scale, minimum
    added = f"splat (float {float(-(code.offset + kind.zero))})"
    lines += [f"  %c = {multiplied(scale, added, minimum if kind.has_minimum else 'zeroinitializer')}"]
    return lines, scale, "%c"


def _widened(name: str, at: str, kind: BlockType) -> list[str]:
    if kind.scale_type == "float16":
        return [f"  %{name}16 = load <16 x half>, ptr {at}, align 1", f"  %{name} = fpext <16 x half> %{name}16 to <16 x float>"]
    return [
        f"  %{name}16 = load <16 x i16>, ptr {at}, align 1",
        f"  %{name}32 = zext <16 x i16> %{name}16 to <16 x i32>",
        f"  %{name}_bits = shl <16 x i32> %{name}32, splat (i32 16)",
        f"  %{name} = bitcast <16 x i32> %{name}_bits to <16 x float>",
    ]


def _stored_scales(code: NumberCode) -> str:
    lines, scale, added = scales(code)
    lines += [f"  store <16 x float> {scale}, ptr %at_scales, align 64"]
    if added is not None:
        lines += ["  %at_c = getelementptr i8, ptr %at_scales, i64 64", f"  store <16 x float> {added}, ptr %at_c, align 64"]
    return "\n".join(lines)


def _factor(name: str, offset: int, to_float: str) -> list[str]:
    return [
        f"  %{name}_off = add i64 %{name}_off0, {offset}",
        f"  %at_{name} = getelementptr i8, ptr %at_tile, i64 %{name}_off",
        f"  %{name}8 = load <16 x i8>, ptr %at_{name}, align 1",
        f"  %{name} = {to_float} <16 x i8> %{name}8 to <16 x float>",
    ]


def _numbers(code: NumberCode) -> str:
    kind = code.kind
    if code.is_integer:
        lines, steps = bytes_of_codes(kind)
        for step, found in enumerate(steps):
            lines += [
                f"  %at_b{step} = getelementptr i8, ptr %at_out, i64 {64 * step}",
                f"  store <16 x i32> {found}, ptr %at_b{step}, align 64",
            ]
        return "\n".join(lines)
    lines = _words(kind)
    for pair in range(code.pairs):
        lines += _signed_pair(pair) if kind.bits == 8 else _looked_up_pair(kind, pair) if kind.values else _offset_pair(code, pair)
        if code.number == "bfloat16":
            lines += [
                f"  %at_p{pair} = getelementptr i8, ptr %at_out, i64 {64 * pair}",
                f"  store <16 x i32> %p{pair}, ptr %at_p{pair}, align 64",
            ]
        else:
            for half, operation in enumerate(("shl <16 x i32> {}, splat (i32 16)", "and <16 x i32> {}, splat (i32 -65536)")):
                lines += [
                    f"  %p{pair}_{half} = {operation.format(f'%p{pair}')}",
                    f"  %at_p{pair}_{half} = getelementptr i8, ptr %at_out, i64 {64 * (2 * pair + half)}",
                    f"  store <16 x i32> %p{pair}_{half}, ptr %at_p{pair}_{half}, align 64",
                ]
    return "\n".join(lines)


def _words(kind: BlockType) -> list[str]:
    lines = [f"  ; codes of {kind.name}"]
    for word in range(sum(words_of_group(kind))):
        lines += [
            f"  %at_w{word} = getelementptr i8, ptr %at_codes, i64 {4 * LANES * word}",
            f"  %w{word} = load <16 x i32>, ptr %at_w{word}, align 1",
        ]
    return lines


def bytes_of_codes(kind: BlockType) -> tuple[list[str], list[str]]:
    """A group's codes as bytes without a sign, four inputs of each output to a step; the steps' names."""
    first, _ = words_of_group(kind)
    lines, steps = _words(kind), list[str]()
    for word in range(first):
        if kind.bits == 8:
            steps.append(f"%b{len(steps)}")
            lines.append(f"  {steps[-1]} = xor <16 x i32> %w{word}, splat (i32 {_four_times(0x80)})")
            continue
        for half in range(2):
            step, found, value = len(steps), f"%low{len(steps)}", f"%w{word}"
            if half:
                lines.append(f"  %down{step} = lshr <16 x i32> %w{word}, splat (i32 4)")
                value = f"%down{step}"
            lines.append(f"  {found} = and <16 x i32> {value}, splat (i32 {_four_times(15)})")
            if kind.bits > 4:
                found = _with_upper_bits(kind, lines, step, INPUT_ORDER[False][4 * half : 4 * half + 4])
            if kind.values:
                of = ", ".join(f"i8 {value + 128}" for _ in range(4) for value in kind.values)
                lines += [
                    f"  %places{step} = bitcast <16 x i32> {found} to <64 x i8>",
                    f"  %found{step} = call <64 x i8> @look_up(<64 x i8> <{of}>, <64 x i8> %places{step})",
                    f"  %b{step} = bitcast <64 x i8> %found{step} to <16 x i32>",
                ]
                found = f"%b{step}"
            steps.append(found)
    return lines, steps


def _with_upper_bits(kind: BlockType, lines: list[str], step: int, order: tuple[int, ...]) -> str:
    """The bits above four of a step's codes, from where words of these have them to their bytes."""
    more, (first, _) = kind.bits - 4, words_of_group(kind)
    masks: dict[tuple[int, int], int] = {}  # by word, and by how far it is shifted to the right
    for byte, value in enumerate(order):
        word, place = divmod(8 * (step // 2) + value, 32 // more)
        shift = more * (place // 2) + 16 * (place % 2) - (8 * byte + 4)
        masks[first + word, shift] = masks.get((first + word, shift), 0) | ((1 << more) - 1) << 8 * byte + 4
    found = f"%low{step}"
    for number, ((word, shift), mask) in enumerate(masks.items()):
        name = f"{step}_{number}"
        signed = mask - (1 << 32) if mask >> 31 else mask
        lines += [
            _shifted(f"moved{name}", f"%w{word}", -shift),
            f"  %upper{name} = and <16 x i32> %moved{name}, splat (i32 {signed})",
            f"  %code{name} = or <16 x i32> {found}, %upper{name}",
        ]
        found = f"%code{name}"
    return found


def _four_times(byte: int) -> int:
    """The same byte four times, in a signed 32-bit integer."""
    return int.from_bytes(bytes([byte] * 4), "little", signed=True)


def _shifted(name: str, value: str, left: int) -> str:
    return f"  %{name} = {'shl' if left >= 0 else 'lshr'} <16 x i32> {value}, splat (i32 {abs(left)})"


def _twice(bits: int) -> int:
    """The same 16 bits in both halves of a signed 32-bit integer."""
    both = bits << 16 | bits
    return both - (1 << 32) if both >> 31 else both


def _offset_pair(code: NumberCode, pair: int) -> list[str]:
    """%p: 2 ** bits plus each code."""
    kind = code.kind
    lowest = 7 - kind.bits  # of the mantissa, where a unit lies
    word, place = divmod(pair, 4)
    lines = [
        _shifted(f"low{pair}", f"%w{word}", lowest - 4 * place),
        f"  %lowest{pair} = and <16 x i32> %low{pair}, splat (i32 {_twice(15 << lowest)})",
    ]
    found = f"%lowest{pair}"
    if more := kind.bits - 4:
        first, _ = words_of_group(kind)
        of_word = 16 // more
        word, place = first + pair // of_word, pair % of_word
        lines += [
            _shifted(f"high{pair}", f"%w{word}", lowest + 4 - more * place),
            f"  %highest{pair} = and <16 x i32> %high{pair}, splat (i32 {_twice((1 << more) - 1 << lowest + 4)})",
            f"  %both{pair} = or <16 x i32> {found}, %highest{pair}",
        ]
        found = f"%both{pair}"
    exponent = _twice(127 + kind.bits << 7)
    return [*lines, f"  %p{pair} = or <16 x i32> {found}, splat (i32 {exponent})"]


def _signed_pair(pair: int) -> list[str]:
    """%p: codes of 8 bits, which bfloat16 holds."""
    word, place = divmod(pair, 2)
    lines = []
    for half in range(2):
        name = f"{pair}_{half}h"
        lines += [
            f"  %up{name} = shl <16 x i32> %w{word}, splat (i32 {24 - 8 * place - 16 * half})",
            f"  %code{name} = ashr <16 x i32> %up{name}, splat (i32 24)",
            f"  %float{name} = sitofp <16 x i32> %code{name} to <16 x float>",
            f"  %bits{name} = bitcast <16 x float> %float{name} to <16 x i32>",
        ]
    return [
        *lines,
        f"  %lower{pair} = lshr <16 x i32> %bits{pair}_0h, splat (i32 16)",
        f"  %p{pair} = or <16 x i32> %lower{pair}, %bits{pair}_1h",
    ]


def _looked_up_pair(kind: BlockType, pair: int) -> list[str]:
    """%p: what the codes stand for; the lower and the upper bytes of their bfloat16 are looked up."""
    word, place = divmod(pair, 4)
    tops = [_bfloat16_bits(value) for value in kind.values]
    lower, upper = (", ".join(f"i8 {top >> shift & 255}" for _ in range(4) for top in tops) for shift in (0, 8))
    return [
        f"  %down{pair} = lshr <16 x i32> %w{word}, splat (i32 {4 * place})",
        f"  %codes{pair} = and <16 x i32> %down{pair}, splat (i32 {_twice(15)})",
        f"  %places{pair} = bitcast <16 x i32> %codes{pair} to <64 x i8>",
        f"  %lower8{pair} = call <64 x i8> @look_up(<64 x i8> <{lower}>, <64 x i8> %places{pair})",
        f"  %upper8{pair} = call <64 x i8> @look_up(<64 x i8> <{upper}>, <64 x i8> %places{pair})",
        f"  %lower{pair} = bitcast <64 x i8> %lower8{pair} to <16 x i32>",
        f"  %upper{pair} = bitcast <64 x i8> %upper8{pair} to <16 x i32>",
        f"  %lower_only{pair} = and <16 x i32> %lower{pair}, splat (i32 {_twice(255)})",
        f"  %upper_only{pair} = and <16 x i32> %upper{pair}, splat (i32 {_twice(255)})",
        f"  %raised{pair} = shl <16 x i32> %upper_only{pair}, splat (i32 8)",
        f"  %p{pair} = or <16 x i32> %lower_only{pair}, %raised{pair}",
    ]


def _bfloat16_bits(value: int) -> int:
    """Of an integer of at most 8 bits."""
    power = abs(value).bit_length() - 1
    return (value < 0) << 15 | 127 + power << 7 | (abs(value) << 7 - power) - 128
