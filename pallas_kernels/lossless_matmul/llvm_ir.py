"""The kernel's code: LLVM IR for a product of rows with a matrix in 12 bits a value.

It expands some steps of some panels into a buffer that fits the first-level cache, writes the few escapes over
them, and multiplies all rows of the chunk with that by `packed_matmul`'s tiles. So sums are those of a packed matrix,
in the same order, and only the bytes that are read from memory differ.
"""

from __future__ import annotations

from pallas_kernels.llvm.custom_call import handler, load_data, load_dim, load_number
from pallas_kernels.llvm.host import HostTarget
from pallas_kernels.llvm.vectors import indices, look_up
from pallas_kernels.lossless_matmul.layout import HEADER_BYTES, STEP_BYTES, STEP_VALUES
from pallas_kernels.packed_matmul.llvm_ir import ROWS_AT_ONCE, declarations, pick_tile, plan, tile, tile_sizes, tile_table

_STEPS_AT_ONCE = 12  # that are expanded: 1.5 KB of each panel
PANEL = f"""{load_dim("segments", 1, 2)}
{load_dim("bytes", 1, 3)}
  %panel = mul i64 %segments, %bytes"""  # bytes of one, of matrices [S, P, K, B]
_STEPS_AHEAD = _STEPS_AT_ONCE  # from what is read to what is prefetched: a panel's next steps during the others'


def module(target: HostTarget) -> str:
    """The IR of the custom call of (x, matrices, place) -> (y), for x in bfloat16."""
    tiles = tile_sizes(target)
    functions = [tile("bfloat16", target, rows, panels, goes_on=True) for rows, most in tiles.items() for panels in range(1, most + 1)]
    kernel = "\n".join(
        [
            declarations("bfloat16", target),
            *functions,
            look_up(target),
            _EXPAND,
            _block(tiles),
            plan(tiles, PANEL),
            _chunk(max(tiles.values())),
        ]
    )
    return handler(target, 3, 1, kernel)


def _interleaved(first: int) -> list[int]:
    """Of each 16 bytes of two vectors of 64, 8 from this one on, in turns."""
    return [16 * lane + first + i + 64 * of_second for lane in range(4) for i in range(8) for of_second in range(2)]


# A bfloat16's upper byte is its sign and seven bits of its exponent, the lower byte the last bit and its mantissa. Each
# code's part of both is looked up, for 64 values at once.
_EXPAND = f"""
define internal void @expand(ptr %tile, i64 %from, i64 %count, ptr %out) {{
entry:
  %header = load i32, ptr %tile
  %base = and i32 %header, 255
  %num_escapes = lshr i32 %header, 16
  %base_first = insertelement <16 x i32> poison, i32 %base, i64 0
  %bases = shufflevector <16 x i32> %base_first, <16 x i32> poison, <16 x i32> zeroinitializer
  %added = add <16 x i32> %bases, <{", ".join(f"i32 {i}" for i in range(16))}>
  %exponents = insertelement <16 x i32> %added, i32 0, i64 0
  %uppers = lshr <16 x i32> %exponents, splat (i32 1)
  %lowers = shl <16 x i32> %exponents, splat (i32 7)
  %uppers8 = trunc <16 x i32> %uppers to <16 x i8>
  %lowers8 = trunc <16 x i32> %lowers to <16 x i8>
  %upper_of = shufflevector <16 x i8> %uppers8, <16 x i8> poison, <64 x i32> <{indices([*range(16)] * 4)}>
  %lower_of = shufflevector <16 x i8> %lowers8, <16 x i8> poison, <64 x i32> <{indices([*range(16)] * 4)}>
  %from_off = mul i64 %from, {STEP_BYTES}
  %body_off = add i64 %from_off, {HEADER_BYTES}
  %body = getelementptr i8, ptr %tile, i64 %body_off
  br label %step
step:
  %k = phi i64 [0, %entry], [%k_next, %step]
  %step_off = mul i64 %k, {STEP_BYTES}
  %at_signs = getelementptr i8, ptr %body, i64 %step_off
  %at_pairs = getelementptr i8, ptr %at_signs, i64 {STEP_VALUES}
  %ahead = getelementptr i8, ptr %at_signs, i64 {_STEPS_AHEAD * STEP_BYTES}
  %ahead_more = getelementptr i8, ptr %ahead, i64 64
  call void @llvm.prefetch.p0(ptr %ahead, i32 0, i32 3, i32 1)
  call void @llvm.prefetch.p0(ptr %ahead_more, i32 0, i32 3, i32 1)
  %signs = load <64 x i8>, ptr %at_signs, align 1
  %pairs = load <32 x i8>, ptr %at_pairs, align 1
  %twice = shufflevector <32 x i8> %pairs, <32 x i8> poison, <64 x i32> <{indices([*range(32)] * 2)}>
  %twice64 = bitcast <64 x i8> %twice to <8 x i64>
  %down = lshr <8 x i64> %twice64, <{", ".join(f"i64 {4 * (i // 4)}" for i in range(8))}>
  %down8 = bitcast <8 x i64> %down to <64 x i8>
  %upper = call <64 x i8> @look_up(<64 x i8> %upper_of, <64 x i8> %down8)
  %lower = call <64 x i8> @look_up(<64 x i8> %lower_of, <64 x i8> %down8)
  %sign = and <64 x i8> %signs, splat (i8 -128)
  %mantissa = and <64 x i8> %signs, splat (i8 127)
  %high = or <64 x i8> %sign, %upper
  %low = or <64 x i8> %mantissa, %lower
  %first_values = shufflevector <64 x i8> %low, <64 x i8> %high, <64 x i32> <{indices(_interleaved(0))}>
  %second_values = shufflevector <64 x i8> %low, <64 x i8> %high, <64 x i32> <{indices(_interleaved(8))}>
  %out_off = shl i64 %k, 7
  %at_first = getelementptr i8, ptr %out, i64 %out_off
  %at_second = getelementptr i8, ptr %at_first, i64 64
  store <64 x i8> %first_values, ptr %at_first, align 64
  store <64 x i8> %second_values, ptr %at_second, align 64
  %k_next = add i64 %k, 1
  %more = icmp ult i64 %k_next, %count
  br i1 %more, label %step, label %escape_test
escape_test:
  %e = phi i32 [0, %step], [%e_next, %escape_end]
  %is_escape = icmp ult i32 %e, %num_escapes
  br i1 %is_escape, label %escape, label %end
escape:
  %e_next = add i32 %e, 1
  %at_entry = getelementptr i32, ptr %tile, i32 %e_next
  %entry_value = load i32, ptr %at_entry
  %place32 = and i32 %entry_value, 65535
  %place = zext i32 %place32 to i64
  %first = mul i64 %from, {STEP_VALUES}
  %here = sub i64 %place, %first
  %room = mul i64 %count, {STEP_VALUES}
  %is_here = icmp ult i64 %here, %room
  br i1 %is_here, label %write, label %escape_end
write:
  %value32 = lshr i32 %entry_value, 16
  %value = trunc i32 %value32 to i16
  %at_value = getelementptr i16, ptr %out, i64 %here
  store i16 %value, ptr %at_value
  br label %escape_end
escape_end:
  br label %escape_test
end:
  ret void
}}"""


def _block(tiles: dict[int, int]) -> str:
    """y[rows, panels * 16] = x times the panels: some panels by some steps at a time, expanded once for all rows."""
    return f"""
{tile_table(tiles)}
define internal void @block(ptr %x, i64 %rows, i64 %segments, i64 %bytes, ptr %w, ptr %y, i64 %outputs, i64 %panels, ptr %expanded) {{
entry:
  %is_tall = icmp uge i64 %rows, {max(tiles)}
  %width = select i1 %is_tall, i64 {tiles[max(tiles)]}, i64 {max(tiles.values())}
  %body_bytes = sub i64 %bytes, {HEADER_BYTES}
  %tile_steps = udiv i64 %body_bytes, {STEP_BYTES}
  %steps = mul i64 %segments, %tile_steps
  %x_row = shl i64 %steps, 3
  %w_panel = mul i64 %segments, %bytes
  %y_row = shl i64 %outputs, 2
  br label %columns
columns:
  %p = phi i64 [0, %entry], [%p_next, %columns_end]
  %panels_left = sub i64 %panels, %p
  %is_last = icmp ult i64 %panels_left, %width
  %num = select i1 %is_last, i64 %panels_left, i64 %width
  %w_off = mul i64 %p, %w_panel
  %w_p = getelementptr i8, ptr %w, i64 %w_off
  %y_off = shl i64 %p, 6
  %y_p = getelementptr i8, ptr %y, i64 %y_off
  br label %segment
segment:
  %s = phi i64 [0, %columns], [%s_next, %segment_end]
  %s_off = mul i64 %s, %bytes
  %w_s = getelementptr i8, ptr %w_p, i64 %s_off
  %x_before = mul i64 %s, %tile_steps
  br label %part
part:
  %from = phi i64 [0, %segment], [%from_next, %part_end]
  %steps_left = sub i64 %tile_steps, %from
  %count = call i64 @llvm.umin.i64(i64 %steps_left, i64 {_STEPS_AT_ONCE})
  %count_bytes = shl i64 %count, 7
  %groups = shl i64 %count, 1
  br label %unpack
unpack:
  %u = phi i64 [0, %part], [%u_next, %unpack]
  %u_off = mul i64 %u, %w_panel
  %w_u = getelementptr i8, ptr %w_s, i64 %u_off
  %out_off = mul i64 %u, %count_bytes
  %out = getelementptr i8, ptr %expanded, i64 %out_off
  call void @expand(ptr %w_u, i64 %from, i64 %count, ptr %out)
  %u_next = add i64 %u, 1
  %more_panels = icmp ult i64 %u_next, %num
  br i1 %more_panels, label %unpack, label %multiply
multiply:
  %before = add i64 %x_before, %from
  %is_first = icmp eq i64 %before, 0
  %x_s = getelementptr i64, ptr %x, i64 %before
  br label %tile
tile:
  %r = phi i64 [0, %multiply], [%r_next, %tile]
  %rows_left = sub i64 %rows, %r
{pick_tile(tiles)}
  %x_off = mul i64 %r, %x_row
  %x_r = getelementptr i8, ptr %x_s, i64 %x_off
  %y_r_off = mul i64 %r, %y_row
  %y_r = getelementptr i8, ptr %y_p, i64 %y_r_off
  call void %function(ptr %x_r, i64 %groups, ptr %expanded, ptr %y_r, i64 %outputs, ptr null, i64 %x_row, i64 %count_bytes, i1 %is_first)
  %r_next = add i64 %r, %tile_rows
  %more_rows = icmp ult i64 %r_next, %rows
  br i1 %more_rows, label %tile, label %part_end
part_end:
  %from_next = add i64 %from, %count
  %more_parts = icmp ult i64 %from_next, %tile_steps
  br i1 %more_parts, label %part, label %segment_end
segment_end:
  %s_next = add i64 %s, 1
  %more_segments = icmp ult i64 %s_next, %segments
  br i1 %more_segments, label %segment, label %columns_end
columns_end:
  %p_next = add i64 %p, %num
  %more = icmp ult i64 %p_next, %panels
  br i1 %more, label %columns, label %end
end:
  ret void
}}"""


def _chunk(most_panels: int) -> str:
    return f"""
define internal void @chunk(ptr %job, i64 %c) {{
{load_data("x", 0)}
{load_data("matrices", 1)}
{load_data("place_data", 2)}
{load_data("y", 3)}
{load_dim("rows", 0, 0)}
{load_dim("inputs", 0, 1)}
{load_dim("panels", 1, 1)}
{load_dim("segments", 1, 2)}
{load_dim("bytes", 1, 3)}
{load_number("size", 0)}
{load_number("across", 1)}
  %outputs = shl i64 %panels, 4
  %place32 = load i32, ptr %place_data
  %place = zext i32 %place32 to i64
  %panel = mul i64 %segments, %bytes
  %matrix = mul i64 %panels, %panel
  %matrix_off = mul i64 %place, %matrix
  %w = getelementptr i8, ptr %matrices, i64 %matrix_off
  %down = udiv i64 %c, %across
  %right = urem i64 %c, %across
  %row = mul i64 %down, {ROWS_AT_ONCE}
  %rows_left = sub i64 %rows, %row
  %rows_here = call i64 @llvm.umin.i64(i64 %rows_left, i64 {ROWS_AT_ONCE})
  %first = mul i64 %right, %size
  %panels_left = sub i64 %panels, %first
  %panels_here = call i64 @llvm.umin.i64(i64 %panels_left, i64 %size)
  %x_place = mul i64 %row, %inputs
  %x_c = getelementptr i16, ptr %x, i64 %x_place
  %w_off = mul i64 %first, %panel
  %w_c = getelementptr i8, ptr %w, i64 %w_off
  %y_row = mul i64 %row, %outputs
  %y_column = shl i64 %first, 4
  %y_place = add i64 %y_row, %y_column
  %y_c = getelementptr i32, ptr %y, i64 %y_place
  %expanded = alloca [{most_panels * _STEPS_AT_ONCE * 2 * STEP_VALUES} x i8], align 64
  call void @block(ptr %x_c, i64 %rows_here, i64 %segments, i64 %bytes, ptr %w_c, ptr %y_c, i64 %outputs, i64 %panels_here, ptr %expanded)
  ret void
}}"""
