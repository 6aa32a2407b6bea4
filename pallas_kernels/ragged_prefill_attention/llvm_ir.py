"""The kernel's code: LLVM IR for one chunk of the attention, a KV head and a tile of tokens of one row.

The tile's queries, of all heads that read this KV head, are rows: token by token, in a copy that is already scaled. The
context is read in runs of up to 64 tokens. Keys are copied transposed, so that 16 tokens are 16 lanes; values are
copied unchanged. A few rows at a time, as many as registers hold sums for, then go through scores, softmax and sum over
values while these are in the first-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.llvm.custom_call import handler, load_data, load_dim, load_number, store_number
from pallas_kernels.llvm.exponential import splat
from pallas_kernels.llvm.host import HostTarget
from pallas_kernels.llvm.page_values import unit
from pallas_kernels.ragged_prefill_attention.llvm_blocking import LANES, VECTOR, PrefillBlocking
from pallas_kernels.ragged_prefill_attention.llvm_softmax import MASKED
from pallas_kernels.ragged_prefill_attention.llvm_steps import steps

_LOG2_E = 1.44269504088896341  # scores are logarithms to base 2
_ROWS_AT_ONCE = 4
_MAX_ROWS = 192
_TILE_BYTES = 1 << 16  # of a tile's queries, and of its sums
_CHUNKS_A_THREAD = 3
_RUN_BYTES = 1 << 14  # of a run's keys, and of its values


@dataclass(frozen=True)
class PrefillShape:
    """What a kernel is compiled for: `group` query heads read a KV head, a chunk has at most `tile` tokens, and rows
    begin at multiples of `query_tile`."""

    head_size: int
    group: int
    page_size: int
    query_tile: int
    tile: int
    scale: float
    value_bytes: int = 4  # of the pool: float32, or codes of float8


def tile_size(query_tile: int, group: int, head_size: int) -> int:
    """Most tokens of a chunk: as many as fit, whole query tiles or an equal part of one."""
    most = max(min(_MAX_ROWS, _TILE_BYTES // (4 * head_size)) // group, 1)
    if most >= query_tile:
        return most - most % query_tile
    return max(size for size in range(1, most + 1) if query_tile % size == 0)


def module(shape: PrefillShape, target: HostTarget) -> str:
    """The IR of a shape's custom call, of (q, kv_pages, layer, page_table, query_start, query_len, kv_len) -> (out)."""
    run = min(max(_RUN_BYTES // (4 * shape.head_size) // LANES, 2), 4) * LANES  # with fewer, too few sums at a time
    blocking = PrefillBlocking(
        _ROWS_AT_ONCE, 4 if target.avx512 else 1, run, shape.head_size, shape.group, shape.page_size, shape.value_bytes
    )
    return handler(target, 7, 1, "\n".join([steps(blocking), _plan(shape), _chunk(shape), _part(shape, blocking)]))


def _plan(shape: PrefillShape) -> str:
    """Chunks are as large as possible, because they fetch the context fewer times, unless that leaves too few for the
    threads."""
    least = min(shape.tile, shape.query_tile)
    return f"""
define internal i64 @plan(ptr %job, i64 %threads) {{
{load_dim("tokens", 0, 0)}
{load_dim("kv_heads", 1, 3)}
  %rounded = add i64 %tokens, {shape.tile - 1}
  %large_tiles = udiv i64 %rounded, {shape.tile}
  %large_chunks = mul i64 %large_tiles, %kv_heads
  %small_tiles = udiv i64 %tokens, {least}
  %small_chunks = mul i64 %small_tiles, %kv_heads
  %wanted = mul i64 %threads, {_CHUNKS_A_THREAD}
  %is_large = icmp uge i64 %large_chunks, %wanted
  %tile = select i1 %is_large, i64 {shape.tile}, i64 {least}
  %tiles = select i1 %is_large, i64 %large_tiles, i64 %small_tiles
  %chunks = select i1 %is_large, i64 %large_chunks, i64 %small_chunks
{store_number("tile", 0)}
{store_number("tiles", 1)}
  ret i64 %chunks
}}"""


def _chunk(shape: PrefillShape) -> str:
    """The last tiles, which have the longest contexts, come first. A tile has a part for each row that it holds tokens
    of."""
    return f"""
define internal void @chunk(ptr %job, i64 %c) {{
entry:
{load_dim("tokens", 0, 0)}
{load_dim("kv_heads", 1, 3)}
{load_number("tile", 0)}
{load_number("tiles", 1)}
  %turn = udiv i64 %c, %kv_heads
  %kv_head = urem i64 %c, %kv_heads
  %after = sub i64 %tiles, %turn
  %end_off = mul i64 %after, %tile
  %start = sub i64 %end_off, %tile
  %end = call i64 @llvm.umin.i64(i64 %end_off, i64 %tokens)
  br label %part
part:
  %from = phi i64 [%start, %entry], [%next, %part]
  %next = call i64 @part(ptr %job, i64 %kv_head, i64 %from, i64 %end)
  %is_more = icmp ult i64 %next, %end
  br i1 %is_more, label %part, label %done
done:
  ret void
}}"""


def _part(shape: PrefillShape, blocking: PrefillBlocking) -> str:
    """Tokens from `tile_start` on, no further than `tile_end`, that belong to the same row or to none. Returns where
    the next ones begin."""
    head_size, group, tile = shape.head_size, shape.group, shape.tile
    wide = head_size * group  # a token's queries for one KV head
    num_rows = -(-tile * group // blocking.at_once) * blocking.at_once
    step = min(tile, shape.query_tile)  # the rest of a row's last tile belongs to no other row
    return f"""
define internal i64 @part(ptr %job, i64 %kv_head, i64 %tile_start, i64 %tile_end) {{
entry:
  %q_rows = alloca [{num_rows * head_size} x float], align 64
  %sums_of_values = alloca [{num_rows * head_size} x float], align 64
  %sums = alloca [{num_rows * LANES} x float], align 64
  %tops = alloca [{num_rows // blocking.at_once * LANES} x float], align 64
  %k = alloca [{LANES * head_size} x float], align 64
  %kt = alloca [{blocking.run * head_size} x float], align 64
  %v = alloca [{blocking.run * head_size} x float], align 64
{load_data("q", 0)}
{load_data("pool", 1)}
{load_data("layer_data", 2)}
{load_data("page_table", 3)}
{load_data("query_start", 4)}
{load_data("query_len", 5)}
{load_data("kv_len", 6)}
{load_data("out", 7)}
{load_dim("heads", 0, 1)}
{load_dim("pages", 1, 2)}
{load_dim("kv_heads", 1, 3)}
{load_dim("num_rows", 3, 0)}
{load_dim("table_width", 3, 1)}
  %room = sub i64 %tile_end, %tile_start
  %token_stride = mul i64 %heads, {head_size}
  %tile_off = mul i64 %tile_start, %token_stride
  %head_off = mul i64 %kv_head, {wide}
  %q_off = add i64 %tile_off, %head_off
  %q_tile = getelementptr float, ptr %q, i64 %q_off
  %out_tile = getelementptr float, ptr %out, i64 %q_off
  br label %find
find:
  %row = phi i64 [0, %entry], [%row_next, %find_next]
  %is_row = icmp ult i64 %row, %num_rows
  br i1 %is_row, label %find_try, label %clear
find_try:
  %begin_at = getelementptr i32, ptr %query_start, i64 %row
  %begin32 = load i32, ptr %begin_at
  %begin = sext i32 %begin32 to i64
  %length_at = getelementptr i32, ptr %query_len, i64 %row
  %length32 = load i32, ptr %length_at
  %length = sext i32 %length32 to i64
  %place = sub i64 %tile_start, %begin
  %is_after = icmp sge i64 %place, 0
  %is_before = icmp slt i64 %place, %length
  %is_inside = and i1 %is_after, %is_before
  br i1 %is_inside, label %found, label %find_next
find_next:
  %row_next = add i64 %row, 1
  br label %find

found:
  %context_at = getelementptr i32, ptr %kv_len, i64 %row
  %context32 = load i32, ptr %context_at
  %context = sext i32 %context32 to i64
  %left = sub i64 %length, %place
  %num_tokens = call i64 @llvm.smin.i64(i64 %left, i64 %room)
  %num = mul i64 %num_tokens, {group}
  %before_row = sub i64 %context, %length
  %first = add i64 %before_row, %place
  %end_of_context = add i64 %first, %num_tokens
  %last = sub i64 %num, 1
  %table_off = mul i64 %row, %table_width
  %table = getelementptr i32, ptr %page_table, i64 %table_off
  %page_stride = mul i64 %kv_heads, {shape.page_size * head_size}
  %part = mul i64 %pages, %page_stride
  %layer32 = load i32, ptr %layer_data
  %layer = sext i32 %layer32 to i64
  %layer_two = shl i64 %layer, 1
  %layer_off = mul i64 %layer_two, %part
  %kv_off = mul i64 %kv_head, {shape.page_size * head_size}
  %keys_values = add i64 %layer_off, %kv_off
  %keys_off = mul i64 %keys_values, {shape.value_bytes}
  %part_bytes = mul i64 %part, {shape.value_bytes}
  %keys = getelementptr i8, ptr %pool, i64 %keys_off
  %values = getelementptr i8, ptr %keys, i64 %part_bytes
  %rows_more = add i64 %num, {blocking.at_once - 1}
  %turns = udiv i64 %rows_more, {blocking.at_once}
  %rows_bytes = mul i64 %turns, {4 * blocking.at_once * head_size}
  %sums_bytes = mul i64 %turns, {4 * blocking.at_once * LANES}
  call void @llvm.memset.p0.i64(ptr %q_rows, i8 0, i64 %rows_bytes, i1 false)
  call void @llvm.memset.p0.i64(ptr %sums_of_values, i8 0, i64 %rows_bytes, i1 false)
  call void @llvm.memset.p0.i64(ptr %sums, i8 0, i64 %sums_bytes, i1 false)
  br label %low
low:
  %low_i = phi i64 [0, %found], [%low_next, %low]
  %low_off = mul i64 %low_i, {LANES}
  %low_at = getelementptr float, ptr %tops, i64 %low_off
  store {VECTOR} {splat(MASKED)}, ptr %low_at, align 64
  %low_next = add i64 %low_i, 1
  %low_more = icmp ult i64 %low_next, %turns
  br i1 %low_more, label %low, label %take
take:
  %t = phi i64 [0, %low], [%t_next, %take_end]
  %take_from_off = mul i64 %t, %token_stride
  %take_from = getelementptr float, ptr %q_tile, i64 %take_from_off
  %take_to_off = mul i64 %t, {wide}
  %take_to = getelementptr float, ptr %q_rows, i64 %take_to_off
  br label %take_one
take_one:
  %h = phi i64 [0, %take], [%h_next, %take_one]
  %h_from = getelementptr float, ptr %take_from, i64 %h
  %h_to = getelementptr float, ptr %take_to, i64 %h
  %h_q = load {VECTOR}, ptr %h_from, align 4
  %h_scaled = fmul {VECTOR} %h_q, {splat(shape.scale * _LOG2_E * unit(shape.value_bytes))}
  store {VECTOR} %h_scaled, ptr %h_to, align 4
  %h_next = add i64 %h, {LANES}
  %h_more = icmp ult i64 %h_next, {wide}
  br i1 %h_more, label %take_one, label %take_end
take_end:
  %t_next = add i64 %t, 1
  %t_more = icmp ult i64 %t_next, %num_tokens
  br i1 %t_more, label %take, label %run

run:
  %start = phi i64 [0, %take_end], [%start_next, %run_end]
  %size_left = sub i64 %end_of_context, %start
  %size = call i64 @llvm.smin.i64(i64 %size_left, i64 {blocking.run})
  %ahead = sub i64 %first, %start
  br label %fetch
fetch:
  %f = phi i64 [0, %run], [%f_next, %fetch]
  %f_start = add i64 %start, %f
  %f_left = sub i64 %size, %f
  %f_size = call i64 @llvm.smin.i64(i64 %f_left, i64 {LANES})
  %f_v_off = mul i64 %f, {head_size}
  %f_v = getelementptr float, ptr %v, i64 %f_v_off
  %f_kt = getelementptr float, ptr %kt, i64 %f
  call void @fetch(ptr %keys, ptr %values, i64 %page_stride, ptr %table, i64 %f_start, i64 %f_size, ptr %k, ptr %f_v)
  call void @transpose(ptr %k, ptr %f_kt)
  %f_next = add i64 %f, {LANES}
  %f_more = icmp slt i64 %f_next, %size
  br i1 %f_more, label %fetch, label %rows
rows:
  %r = phi i64 [0, %fetch], [%r_next, %rows]
  %r_off = mul i64 %r, {head_size}
  %r_q = getelementptr float, ptr %q_rows, i64 %r_off
  %r_out = getelementptr float, ptr %sums_of_values, i64 %r_off
  %r_sums_off = mul i64 %r, {LANES}
  %r_sums = getelementptr float, ptr %sums, i64 %r_sums_off
  %r_turn = udiv i64 %r, {blocking.at_once}
  %r_tops_off = mul i64 %r_turn, {LANES}
  %r_tops = getelementptr float, ptr %tops, i64 %r_tops_off
  %r_next = add i64 %r, {blocking.at_once}
  %r_end = sub i64 %r_next, 1
  %r_last = call i64 @llvm.smin.i64(i64 %r_end, i64 %last)
  call void @attend(ptr %r_q, i64 %r, i64 %r_last, i64 %ahead, i64 %size, ptr %kt, ptr %v, ptr %r_out, ptr %r_tops, ptr %r_sums)
  %r_more = icmp ult i64 %r_next, %num
  br i1 %r_more, label %rows, label %run_end
run_end:
  %start_next = add i64 %start, {blocking.run}
  %start_more = icmp slt i64 %start_next, %end_of_context
  br i1 %start_more, label %run, label %give

give:
  %g = phi i64 [0, %run_end], [%g_next, %give_end]
  %g_token = udiv i64 %g, {group}
  %g_head = urem i64 %g, {group}
  %g_token_off = mul i64 %g_token, %token_stride
  %g_head_off = mul i64 %g_head, {head_size}
  %g_off = add i64 %g_token_off, %g_head_off
  %g_to = getelementptr float, ptr %out_tile, i64 %g_off
  %g_from_off = mul i64 %g, {head_size}
  %g_from = getelementptr float, ptr %sums_of_values, i64 %g_from_off
  %g_sums_off = mul i64 %g, {LANES}
  %g_sums_at = getelementptr float, ptr %sums, i64 %g_sums_off
  %g_sums = load {VECTOR}, ptr %g_sums_at, align 64
  %g_total = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {VECTOR} %g_sums)
  %g_share = fdiv float {unit(shape.value_bytes)}, %g_total
  %g_share_first = insertelement {VECTOR} poison, float %g_share, i64 0
  %g_shares = shufflevector {VECTOR} %g_share_first, {VECTOR} poison, <{LANES} x i32> zeroinitializer
  br label %give_one
give_one:
  %e = phi i64 [0, %give], [%e_next, %give_one]
  %e_from = getelementptr float, ptr %g_from, i64 %e
  %e_to = getelementptr float, ptr %g_to, i64 %e
  %e_value = load {VECTOR}, ptr %e_from, align 4
  %e_share = fmul {VECTOR} %e_value, %g_shares
  store {VECTOR} %e_share, ptr %e_to, align 4
  %e_next = add i64 %e, {LANES}
  %e_more = icmp ult i64 %e_next, {head_size}
  br i1 %e_more, label %give_one, label %give_end
give_end:
  %g_next = add i64 %g, 1
  %g_more = icmp ult i64 %g_next, %num
  br i1 %g_more, label %give, label %clear

clear:                                        ; tokens of no row
  %used = phi i64 [0, %find], [%num_tokens, %give_end]
  %used_some = call i64 @llvm.umax.i64(i64 %used, i64 1)
  %used_more = add i64 %used_some, {step - 1}
  %steps = udiv i64 %used_more, {step}
  %taken = mul i64 %steps, {step}
  br label %clear_token
clear_token:
  %z = phi i64 [%used, %clear], [%z_next, %clear_one]
  %z_more = icmp ult i64 %z, %taken
  br i1 %z_more, label %clear_one, label %end
clear_one:
  %z_off = mul i64 %z, %token_stride
  %z_at = getelementptr float, ptr %out_tile, i64 %z_off
  call void @llvm.memset.p0.i64(ptr %z_at, i8 0, i64 {4 * wide}, i1 false)
  %z_next = add i64 %z, 1
  br label %clear_token
end:
  %next_start = add i64 %tile_start, %taken
  ret i64 %next_start
}}
declare float @llvm.vector.reduce.fadd.v16f32(float, {VECTOR})"""
