"""The exponential of 16 float32 at once, in LLVM IR (coefficients: Cephes' expf)."""

from __future__ import annotations

import struct

_LOG2_E = 1.44269504088896341
# the first has few bits, so that its product with a small integer is exact
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOWEST = -87.0  # below it the result is 0: smaller results would be subnormal


def exponential() -> str:
    """IR that defines `<16 x float> @exp16(<16 x float>)`: e to numbers up to 88, relative error below 2e-7; 0 below
    -87; NaN of NaN."""
    lines = [
        "declare <16 x float> @llvm.rint.v16f32(<16 x float>)",
        "declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)",
        "define internal <16 x float> @exp16(<16 x float> %x) alwaysinline {",
        f"  %scaled = fmul <16 x float> %x, {splat(_LOG2_E)}",
        "  %whole = call <16 x float> @llvm.rint.v16f32(<16 x float> %scaled)",
        "  %minus = fneg <16 x float> %whole",
        f"  %rest_high = call <16 x float> @llvm.fma.v16f32(<16 x float> %minus, <16 x float> {splat(_LN2_HIGH)}, <16 x float> %x)",
        f"  %r = call <16 x float> @llvm.fma.v16f32(<16 x float> %minus, <16 x float> {splat(_LN2_LOW)}, <16 x float> %rest_high)",
    ]
    last = splat(_COEFFICIENTS[0])
    for i, coefficient in enumerate(_COEFFICIENTS[1:]):
        lines.append(
            f"  %p{i} = call <16 x float> @llvm.fma.v16f32(<16 x float> {last}, <16 x float> %r, <16 x float> {splat(coefficient)})"
        )
        last = f"%p{i}"
    lines += [
        "  %square = fmul <16 x float> %r, %r",
        f"  %curved = call <16 x float> @llvm.fma.v16f32(<16 x float> {last}, <16 x float> %square, <16 x float> %r)",
        f"  %mantissa = fadd <16 x float> %curved, {splat(1.0)}",
        # Two to the whole: its exponent bits. Values out of range are replaced below.
        f"  %is_low = fcmp olt <16 x float> %x, {splat(_LOWEST)}",
        "  %in_range = select <16 x i1> %is_low, <16 x float> zeroinitializer, <16 x float> %whole",
        "  %is_nan = fcmp uno <16 x float> %in_range, %in_range",
        "  %finite = select <16 x i1> %is_nan, <16 x float> zeroinitializer, <16 x float> %in_range",
        "  %integer = fptosi <16 x float> %finite to <16 x i32>",
        "  %biased = add <16 x i32> %integer, splat (i32 127)",
        "  %bits = shl <16 x i32> %biased, splat (i32 23)",
        "  %power = bitcast <16 x i32> %bits to <16 x float>",
        "  %result = fmul <16 x float> %mantissa, %power",
        "  %found = select <16 x i1> %is_low, <16 x float> zeroinitializer, <16 x float> %result",
        "  ret <16 x float> %found",
        "}",
    ]
    return "\n".join(lines)


def splat(value: float) -> str:
    """A constant vector of 16 times this number, as IR writes a float: by the bits of the double that has its value."""
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    return f"splat (float 0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X})"
