"""The code that rounds rows for the integer kernel: LLVM IR of the custom call (x) -> (rounded, sums, units).

A value becomes an integer of 16 bits times its row's unit. The integer is kept as two of 8 bits, signed: what VNNI
multiplies. Four inputs' upper parts come first, then their lower ones, in the order in which codes are expanded.
"""

from __future__ import annotations

from pallas_kernels.block_matmul.block_types import BlockType
from pallas_kernels.block_matmul.expansion_llvm_ir import INPUT_ORDER
from pallas_kernels.llvm.custom_call import handler, load_data, load_dim
from pallas_kernels.llvm.host import HostTarget
from pallas_kernels.llvm.vectors import indices

MOST = 127 * 256  # so that neither part of an integer needs a ninth bit
_ROWS = 8  # of a chunk
_TINY = "0x3810000000000000"  # the smallest normal float32, as LLVM writes it


def module(kind: BlockType, target: HostTarget) -> str:
    """x: float32 [T, I]. rounded: int16 [T, I], as above; sums: int32 [T, I / group]; units: float32 [T]."""
    return handler(target, 1, 3, f"{_DECLARATIONS}\n{_row(kind)}\n{_PLAN}\n{_CHUNK}")


_DECLARATIONS = """
declare <16 x float> @llvm.fabs.v16f32(<16 x float>)
declare <16 x float> @llvm.maximum.v16f32(<16 x float>, <16 x float>)
declare float @llvm.vector.reduce.fmaximum.v16f32(<16 x float>)
declare float @llvm.maximum.f32(float, float)
declare <16 x i32> @llvm.x86.avx512.mask.cvtps2dq.512(<16 x float>, <16 x i32>, i16, i32)
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)"""


def _row(kind: BlockType) -> str:
    vectors = kind.group // 16
    order = INPUT_ORDER[kind.bits == 8]
    # of 16 inputs: the bytes of four upper parts, of their lower parts, of the next four
    places = [
        part * 16 + start + place
        for start in range(0, 16, len(order))
        for four in range(0, len(order), 4)
        for part in range(2)
        for place in order[four : four + 4]
    ]
    lines = []
    for vector in range(vectors):
        v = str(vector)
        lines += [
            f"  %at_x{v} = getelementptr float, ptr %x_g, i64 {16 * vector}",
            f"  %x{v} = load <16 x float>, ptr %at_x{v}, align 4",
            f"  %scaled{v} = fmul <16 x float> %x{v}, %inverse",
            f"  %q{v} = call <16 x i32> @llvm.x86.avx512.mask.cvtps2dq.512(<16 x float> %scaled{v}, <16 x i32> zeroinitializer, i16 -1, i32 4)",
            f"  %up{v} = add <16 x i32> %q{v}, splat (i32 128)",
            f"  %high{v} = ashr <16 x i32> %up{v}, splat (i32 8)",
            f"  %high8{v} = trunc <16 x i32> %high{v} to <16 x i8>",
            f"  %low8{v} = trunc <16 x i32> %q{v} to <16 x i8>",  # what the upper part, times 256, leaves
            f"  %both{v} = shufflevector <16 x i8> %high8{v}, <16 x i8> %low8{v}, <32 x i32> <{indices(places)}>",
            f"  %at_out{v} = getelementptr i8, ptr %out_g, i64 {32 * vector}",
            f"  store <32 x i8> %both{v}, ptr %at_out{v}, align 1",
        ]
    total = "%q0"
    for vector in range(1, vectors):
        lines.append(f"  %total{vector} = add <16 x i32> {total}, %q{vector}")
        total = f"%total{vector}"
    numbers = "\n".join(lines)
    return f"""
define internal void @row(ptr %x, i64 %inputs, ptr %out, ptr %sums, ptr %unit_at) {{
entry:
  br label %most
most:
  %i = phi i64 [0, %entry], [%i_next, %most]
  %largest = phi <16 x float> [zeroinitializer, %entry], [%larger, %most]
  %at = getelementptr float, ptr %x, i64 %i
  %values = load <16 x float>, ptr %at, align 4
  %sizes = call <16 x float> @llvm.fabs.v16f32(<16 x float> %values)
  %larger = call <16 x float> @llvm.maximum.v16f32(<16 x float> %largest, <16 x float> %sizes)
  %i_next = add i64 %i, 16
  %more = icmp ult i64 %i_next, %inputs
  br i1 %more, label %most, label %divide
divide:
  %of_row = call float @llvm.vector.reduce.fmaximum.v16f32(<16 x float> %larger)
  %positive = call float @llvm.maximum.f32(float %of_row, float {_TINY})
  %unit = fdiv float %positive, {float(MOST):e}
  store float %unit, ptr %unit_at, align 4
  %one_inverse = fdiv float {float(MOST):e}, %positive
  %first = insertelement <16 x float> poison, float %one_inverse, i64 0
  %inverse = shufflevector <16 x float> %first, <16 x float> poison, <16 x i32> zeroinitializer
  br label %group
group:
  %g = phi i64 [0, %divide], [%g_next, %group]
  %start = mul i64 %g, {kind.group}
  %x_g = getelementptr float, ptr %x, i64 %start
  %out_g = getelementptr i16, ptr %out, i64 %start
{numbers}
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> {total})
  %sum_at = getelementptr i32, ptr %sums, i64 %g
  store i32 %sum, ptr %sum_at, align 4
  %g_next = add i64 %g, 1
  %g_start = mul i64 %g_next, {kind.group}
  %more_groups = icmp ult i64 %g_start, %inputs
  br i1 %more_groups, label %group, label %end
end:
  ret void
}}"""


_PLAN = f"""
define internal i64 @plan(ptr %job, i64 %threads) {{
{load_dim("rows", 0, 0)}
  %rows_more = add i64 %rows, {_ROWS - 1}
  %chunks = udiv i64 %rows_more, {_ROWS}
  ret i64 %chunks
}}"""

_CHUNK = f"""
define internal void @chunk(ptr %job, i64 %c) {{
entry:
{load_data("x", 0)}
{load_data("out", 1)}
{load_data("sums", 2)}
{load_data("units", 3)}
{load_dim("rows", 0, 0)}
{load_dim("inputs", 0, 1)}
{load_dim("groups", 2, 1)}
  %begin = mul i64 %c, {_ROWS}
  %after = add i64 %begin, {_ROWS}
  %end_row = call i64 @llvm.umin.i64(i64 %after, i64 %rows)
  br label %row
row:
  %r = phi i64 [%begin, %entry], [%r_next, %row]
  %place = mul i64 %r, %inputs
  %x_r = getelementptr float, ptr %x, i64 %place
  %out_r = getelementptr i16, ptr %out, i64 %place
  %sums_place = mul i64 %r, %groups
  %sums_r = getelementptr i32, ptr %sums, i64 %sums_place
  %unit_r = getelementptr float, ptr %units, i64 %r
  call void @row(ptr %x_r, i64 %inputs, ptr %out_r, ptr %sums_r, ptr %unit_r)
  %r_next = add i64 %r, 1
  %more = icmp ult i64 %r_next, %end_row
  br i1 %more, label %row, label %end
end:
  ret void
}}"""
