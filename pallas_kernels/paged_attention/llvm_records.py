"""LLVM IR for records: the softmax state of one query head over some of a context's tokens (online softmax,
arXiv:1805.02867)."""

from __future__ import annotations

from pallas_kernels.llvm.exponential import splat
from pallas_kernels.llvm.page_values import unit
from pallas_kernels.paged_attention.llvm_tiles import LANES, DecodeShape, broadcast, loop

_LOWEST = -1e30  # before the first score


def records(shape: DecodeShape) -> str:
    """The functions on records of one query head each, and on their run of scores or weights."""
    return "\n".join([_empty(shape), _weigh(shape), _merge(shape), _finish(shape)])


def lowest() -> str:
    """A vector below all scores."""
    return splat(_LOWEST)


def _max_and_sum(shape: DecodeShape, record: str, name: str) -> str:
    """IR for the addresses of a record's two numbers."""
    return (
        f" %{name}max_at = getelementptr float, ptr {record}, i64 {shape.head_size}\n"
        f" %{name}sum_at = getelementptr float, ptr {record}, i64 {shape.head_size + 1}"
    )


def _empty(shape: DecodeShape) -> str:
    clear = """ %at = getelementptr float, ptr %record, i64 %i
 store <16 x float> zeroinitializer, ptr %at, align 4"""
    return f"""
define internal void @empty(ptr %record) {{
{loop("i", shape.record_size, LANES, clear)}
{_max_and_sum(shape, "%record", "")}
 %lowest = extractelement <16 x float> {lowest()}, i64 0
 store float %lowest, ptr %max_at
 ret void
}}"""


def _weigh(shape: DecodeShape) -> str:
    """Turns a run's scores into weights below the maximum so far, and rescales the record to that maximum."""
    weigh = """ %at = getelementptr float, ptr %scores, i64 %t
 %score = load <16 x float>, ptr %at, align 64
 %below = fsub <16 x float> %score, %maxes
 %weights = call <16 x float> @exp16(<16 x float> %below)
 store <16 x float> %weights, ptr %at, align 64
 %new_sums = fadd <16 x float> %sums, %weights"""
    lower = """ %out_at = getelementptr float, ptr %record, i64 %i
 %out = load <16 x float>, ptr %out_at, align 4
 %lowered = fmul <16 x float> %out, %shares
 store <16 x float> %lowered, ptr %out_at, align 4"""
    return f"""
declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)
declare float @llvm.vector.reduce.fadd.v16f32(float, <16 x float>)
define internal void @weigh(ptr %scores, i64 %tokens, ptr %tops, ptr %record) {{
{_max_and_sum(shape, "%record", "")}
 %top = load <16 x float>, ptr %tops, align 64
 %here = call nnan float @llvm.vector.reduce.fmax.v16f32(<16 x float> %top)
 %before = load float, ptr %max_at
 %is_higher = fcmp ogt float %here, %before
 %max = select i1 %is_higher, float %here, float %before
{broadcast("maxes", "%max")}
{broadcast("befores", "%before")}
{loop("t", "%tokens", LANES, weigh, carried=(("<16 x float>", "sums", "zeroinitializer", "%new_sums"),))}
 %sum = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, <16 x float> %new_sums)
 %fall = fsub <16 x float> %befores, %maxes
 %shares = call <16 x float> @exp16(<16 x float> %fall)
 %share = extractelement <16 x float> %shares, i64 0
 %sum_before = load float, ptr %sum_at
 %sum_kept = fmul float %sum_before, %share
 %new_sum = fadd float %sum_kept, %sum
 store float %max, ptr %max_at
 store float %new_sum, ptr %sum_at
{loop("i", shape.head_size, LANES, lower)}
 ret void
}}"""


def _merge(shape: DecodeShape) -> str:
    """Merges two records into the first."""
    add = """ %a_at = getelementptr float, ptr %a, i64 %i
 %b_at = getelementptr float, ptr %b, i64 %i
 %a_out = load <16 x float>, ptr %a_at, align 4
 %b_out = load <16 x float>, ptr %b_at, align 4
 %b_part = fmul <16 x float> %b_out, %b_shares
 %out = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %a_out, <16 x float> %a_shares, <16 x float> %b_part)
 store <16 x float> %out, ptr %a_at, align 4"""
    return f"""
define internal void @merge(ptr %a, ptr %b) {{
{_max_and_sum(shape, "%a", "a_")}
{_max_and_sum(shape, "%b", "b_")}
 %a_max = load float, ptr %a_max_at
 %b_max = load float, ptr %b_max_at
 %is_higher = fcmp ogt float %b_max, %a_max
 %max = select i1 %is_higher, float %b_max, float %a_max
 %a_below = fsub float %a_max, %max
 %b_below = fsub float %b_max, %max
 %below_a = insertelement <16 x float> zeroinitializer, float %a_below, i64 0
 %below = insertelement <16 x float> %below_a, float %b_below, i64 1
 %shares = call <16 x float> @exp16(<16 x float> %below)
 %a_share = extractelement <16 x float> %shares, i64 0
 %b_share = extractelement <16 x float> %shares, i64 1
{broadcast("a_shares", "%a_share")}
{broadcast("b_shares", "%b_share")}
 %a_sum = load float, ptr %a_sum_at
 %b_sum = load float, ptr %b_sum_at
 %a_kept = fmul float %a_sum, %a_share
 %b_kept = fmul float %b_sum, %b_share
 %sum = fadd float %a_kept, %b_kept
 store float %max, ptr %a_max_at
 store float %sum, ptr %a_sum_at
{loop("i", shape.head_size, LANES, add)}
 ret void
}}"""


def _finish(shape: DecodeShape) -> str:
    """The attention output of a record's query head."""
    divide = """ %at = getelementptr float, ptr %record, i64 %i
 %value = load <16 x float>, ptr %at, align 4
 %divided = fdiv <16 x float> %value, %sums
 %out_at = getelementptr float, ptr %out, i64 %i
 store <16 x float> %divided, ptr %out_at, align 4"""
    return f"""
define internal void @finish(ptr %record, ptr %out) {{
{_max_and_sum(shape, "%record", "")}
 %sum_of_read = load float, ptr %sum_at
 %sum = fmul float %sum_of_read, {1 / unit(shape.value_bytes)}
{broadcast("sums", "%sum")}
{loop("i", shape.head_size, LANES, divide)}
 ret void
}}"""
