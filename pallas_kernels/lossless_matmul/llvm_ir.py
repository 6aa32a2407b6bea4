"""The kernels' code: LLVM IR for a product of rows with a matrix in 12 bits a value, and for packing one.

The product expands some steps of some panels into a buffer that fits the first-level cache, writes the few escapes over
them, and multiplies all rows of the chunk with that by `packed_matmul`'s tiles. So sums are those of a packed matrix,
in the same order, and only the bytes that are read from memory differ.
"""

from __future__ import annotations

from pallas_kernels.llvm.custom_call import handler, load_data, load_dim, load_number, store_number
from pallas_kernels.llvm.host import HostTarget
from pallas_kernels.lossless_matmul.layout import HEADER_BYTES, MOST_ESCAPES, STEP_BYTES, STEP_VALUES, WINDOW
from pallas_kernels.packed_matmul.llvm_ir import CHUNK_BYTES, ROWS_AT_ONCE, declarations, pick_tile, tile, tile_sizes, tile_table

_STEPS_AT_ONCE = 64  # that are expanded: 4 KB of each panel
_TILES_AT_ONCE = 16  # of a chunk, when packing


def product_module(target: HostTarget) -> str:
    """The IR of the custom call of (x, matrices, place) -> (y), for x in bfloat16."""
    tiles = tile_sizes(target)
    functions = [tile("bfloat16", target, rows, panels, goes_on=True) for rows, most in tiles.items() for panels in range(1, most + 1)]
    kernel = "\n".join([declarations("bfloat16", target), *functions, _EXPAND, _block(tiles), _plan(tiles), _chunk(max(tiles.values()))])
    return handler(target, 3, 1, kernel)


_EXPAND = f"""
define internal void @expand(ptr %tile, i64 %from, i64 %count, ptr %out) {{
entry:
  %header = load i32, ptr %tile
  %base = and i32 %header, 255
  %num_escapes = lshr i32 %header, 16
  %base16 = trunc i32 %base to i16
  %base_up = shl i16 %base16, 7
  %base_first = insertelement <32 x i16> poison, i16 %base_up, i64 0
  %bases = shufflevector <32 x i16> %base_first, <32 x i16> poison, <32 x i32> zeroinitializer
  %from_off = mul i64 %from, {STEP_BYTES}
  %body_off = add i64 %from_off, {HEADER_BYTES}
  %body = getelementptr i8, ptr %tile, i64 %body_off
  br label %step
step:
  %k = phi i64 [0, %entry], [%k_next, %step]
  %step_off = mul i64 %k, {STEP_BYTES}
  %at_signs = getelementptr i8, ptr %body, i64 %step_off
  %at_pairs = getelementptr i8, ptr %at_signs, i64 {STEP_VALUES}
  %signs8 = load <32 x i8>, ptr %at_signs, align 1
  %pairs8 = load <16 x i8>, ptr %at_pairs, align 1
  %pairs = zext <16 x i8> %pairs8 to <16 x i16>
  %high_up = shl <16 x i16> %pairs, splat (i16 3)
  %low_up = shl <16 x i16> %pairs, splat (i16 7)
  %up = shufflevector <16 x i16> %low_up, <16 x i16> %high_up, <32 x i32> <{", ".join(f"i32 {i}" for i in range(32))}>
  %codes = and <32 x i16> %up, splat (i16 1920)
  %is_none = icmp eq <32 x i16> %codes, zeroinitializer
  %moved = add <32 x i16> %codes, %bases
  %exponents = select <32 x i1> %is_none, <32 x i16> zeroinitializer, <32 x i16> %moved
  %wide = sext <32 x i8> %signs8 to <32 x i16>
  %signs = and <32 x i16> %wide, splat (i16 -32641)
  %values = or <32 x i16> %signs, %exponents
  %out_off = shl i64 %k, 6
  %at_out = getelementptr i8, ptr %out, i64 %out_off
  store <32 x i16> %values, ptr %at_out, align 64
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
  %x_row = shl i64 %steps, 2
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
  %count_bytes = shl i64 %count, 6
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
  %x_s = getelementptr i32, ptr %x, i64 %before
  br label %tile
tile:
  %r = phi i64 [0, %multiply], [%r_next, %tile]
  %rows_left = sub i64 %rows, %r
{pick_tile(tiles)}
  %x_off = mul i64 %r, %x_row
  %x_r = getelementptr i8, ptr %x_s, i64 %x_off
  %y_r_off = mul i64 %r, %y_row
  %y_r = getelementptr i8, ptr %y_p, i64 %y_r_off
  call void %function(ptr %x_r, i64 %count, ptr %expanded, ptr %y_r, i64 %outputs, ptr null, i64 %x_row, i64 %count_bytes, i1 %is_first)
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


def _plan(tiles: dict[int, int]) -> str:
    """As `packed_matmul`'s: whole tiles of panels, of `CHUNK_BYTES` at most, and at least two chunks a thread."""
    tallest = max(tiles)
    return f"""
define internal i64 @plan(ptr %job, i64 %threads) {{
{load_dim("rows", 0, 0)}
{load_dim("panels", 1, 1)}
{load_dim("segments", 1, 2)}
{load_dim("bytes", 1, 3)}
  %panel = mul i64 %segments, %bytes
  %by_bytes = udiv i64 {CHUNK_BYTES}, %panel
  %shares = shl i64 %threads, 1
  %rounded = add i64 %panels, %shares
  %rounded_less = sub i64 %rounded, 1
  %by_threads = udiv i64 %rounded_less, %shares
  %wanted = call i64 @llvm.umin.i64(i64 %by_bytes, i64 %by_threads)
  %is_tall = icmp uge i64 %rows, {tallest}
  %width = select i1 %is_tall, i64 {tiles[tallest]}, i64 {max(tiles.values())}
  %least = call i64 @llvm.umax.i64(i64 %wanted, i64 %width)
  %surplus = urem i64 %least, %width
  %size = sub i64 %least, %surplus
  %across_more = add i64 %panels, %size
  %across_less = sub i64 %across_more, 1
  %across = udiv i64 %across_less, %size
  %down_more = add i64 %rows, {ROWS_AT_ONCE - 1}
  %down = udiv i64 %down_more, {ROWS_AT_ONCE}
  %chunks = mul i64 %across, %down
{store_number("size", 0)}
{store_number("across", 1)}
  ret i64 %chunks
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


def packing_module(target: HostTarget) -> str:
    """The IR of the custom call of (values, bits of bfloat16 [tiles, values]) -> (packed tiles [tiles, bytes])."""
    return handler(target, 1, 1, "\n".join([_PACK_TILE, _PACK_PLAN, _PACK_CHUNK]))


# The window with the most values is found from counts of exponents; a sum slides over them.
_PACK_TILE = f"""
declare i32 @llvm.cttz.i32(i32, i1)
define internal void @pack_tile(ptr %values, i64 %steps, ptr %tile) {{
entry:
  %counts = alloca [512 x i32], align 64
  br label %clear
clear:
  %z = phi i64 [0, %entry], [%z_next, %clear]
  %at_z = getelementptr i32, ptr %counts, i64 %z
  store <16 x i32> zeroinitializer, ptr %at_z, align 64
  %z_next = add i64 %z, 16
  %more_z = icmp ult i64 %z_next, 512
  br i1 %more_z, label %clear, label %count_start
count_start:
  %num = mul i64 %steps, {STEP_VALUES}
  br label %count
count:
  %v = phi i64 [0, %count_start], [%v_next, %count]
  %at_v = getelementptr i16, ptr %values, i64 %v
  %two = load i32, ptr %at_v, align 2
  %even_shifted = lshr i32 %two, 7
  %even = and i32 %even_shifted, 255
  %odd_shifted = lshr i32 %two, 23
  %odd_low = and i32 %odd_shifted, 255
  %odd = or i32 %odd_low, 256                 ; counts of their own: one would wait for the other
  %at_even = getelementptr i32, ptr %counts, i32 %even
  %was_even = load i32, ptr %at_even
  %now_even = add i32 %was_even, 1
  store i32 %now_even, ptr %at_even
  %at_odd = getelementptr i32, ptr %counts, i32 %odd
  %was_odd = load i32, ptr %at_odd
  %now_odd = add i32 %was_odd, 1
  store i32 %now_odd, ptr %at_odd
  %v_next = add i64 %v, 2
  %more_v = icmp ult i64 %v_next, %num
  br i1 %more_v, label %count, label %slide
slide:
  %top = phi i32 [1, %count], [%top_next, %slide]
  %sum = phi i32 [0, %count], [%sum_next, %slide]
  %best = phi i32 [0, %count], [%best_next, %slide]
  %base = phi i32 [0, %count], [%base_next, %slide]
  %at_top = getelementptr i32, ptr %counts, i32 %top
  %top_odd = or i32 %top, 256
  %at_top_odd = getelementptr i32, ptr %counts, i32 %top_odd
  %of_top = load i32, ptr %at_top
  %of_top_odd = load i32, ptr %at_top_odd
  %bottom = sub i32 %top, {WINDOW}
  %has_bottom = icmp sgt i32 %bottom, 0
  %left = select i1 %has_bottom, i32 %bottom, i32 0
  %left_odd = or i32 %left, 256
  %at_left = getelementptr i32, ptr %counts, i32 %left
  %at_left_odd = getelementptr i32, ptr %counts, i32 %left_odd
  %of_left = load i32, ptr %at_left
  %of_left_odd = load i32, ptr %at_left_odd
  %both_left = add i32 %of_left, %of_left_odd
  %lost = select i1 %has_bottom, i32 %both_left, i32 0
  %both_top = add i32 %of_top, %of_top_odd
  %sum_more = add i32 %sum, %both_top
  %sum_next = sub i32 %sum_more, %lost
  %is_better = icmp ugt i32 %sum_next, %best
  %best_next = select i1 %is_better, i32 %sum_next, i32 %best
  %base_next = select i1 %is_better, i32 %left, i32 %base
  %top_next = add i32 %top, 1
  %more_top = icmp ult i32 %top_next, 256
  br i1 %more_top, label %slide, label %encode
encode:
  store <16 x i32> zeroinitializer, ptr %tile, align 1
  %base16 = trunc i32 %base_next to i16
  %base_first = insertelement <32 x i16> poison, i16 %base16, i64 0
  %bases = shufflevector <32 x i16> %base_first, <32 x i16> poison, <32 x i32> zeroinitializer
  %body = getelementptr i8, ptr %tile, i64 {HEADER_BYTES}
  br label %step
step:
  %k = phi i64 [0, %encode], [%k_next, %step_end]
  %n = phi i32 [0, %encode], [%n_step, %step_end]
  %at_values = getelementptr <32 x i16>, ptr %values, i64 %k
  %bits = load <32 x i16>, ptr %at_values, align 2
  %shifted = lshr <32 x i16> %bits, splat (i16 7)
  %exponents = and <32 x i16> %shifted, splat (i16 255)
  %code = sub <32 x i16> %exponents, %bases
  %code_less = sub <32 x i16> %code, splat (i16 1)
  %fits = icmp ult <32 x i16> %code_less, splat (i16 {WINDOW})
  %is_zero = icmp eq <32 x i16> %exponents, zeroinitializer
  %kept = xor <32 x i1> %is_zero, splat (i1 true)
  %has_code = and <32 x i1> %fits, %kept
  %codes = select <32 x i1> %has_code, <32 x i16> %code, <32 x i16> zeroinitializer
  %sound = or <32 x i1> %has_code, %is_zero
  %wrong = xor <32 x i1> %sound, splat (i1 true)
  %sign_down = lshr <32 x i16> %bits, splat (i16 8)
  %sign = and <32 x i16> %sign_down, splat (i16 128)
  %mantissa = and <32 x i16> %bits, splat (i16 127)
  %signs = or <32 x i16> %sign, %mantissa
  %signs8 = trunc <32 x i16> %signs to <32 x i8>
  %low = shufflevector <32 x i16> %codes, <32 x i16> poison, <16 x i32> <{", ".join(f"i32 {i}" for i in range(16))}>
  %high = shufflevector <32 x i16> %codes, <32 x i16> poison, <16 x i32> <{", ".join(f"i32 {i}" for i in range(16, 32))}>
  %high_up = shl <16 x i16> %high, splat (i16 4)
  %pairs = or <16 x i16> %low, %high_up
  %pairs8 = trunc <16 x i16> %pairs to <16 x i8>
  %step_off = mul i64 %k, {STEP_BYTES}
  %at_signs = getelementptr i8, ptr %body, i64 %step_off
  %at_pairs = getelementptr i8, ptr %at_signs, i64 {STEP_VALUES}
  store <32 x i8> %signs8, ptr %at_signs, align 1
  store <16 x i8> %pairs8, ptr %at_pairs, align 1
  %mask = bitcast <32 x i1> %wrong to i32
  br label %escape_test
escape_test:
  %left_mask = phi i32 [%mask, %step], [%mask_next, %escape_end]
  %n_step = phi i32 [%n, %step], [%n_next, %escape_end]
  %is_more = icmp ne i32 %left_mask, 0
  br i1 %is_more, label %escape, label %step_end
escape:
  %lane32 = call i32 @llvm.cttz.i32(i32 %left_mask, i1 true)
  %mask_less = sub i32 %left_mask, 1
  %mask_next = and i32 %left_mask, %mask_less
  %n_next = add i32 %n_step, 1
  %has_room = icmp ule i32 %n_next, {MOST_ESCAPES}
  br i1 %has_room, label %write, label %escape_end
write:
  %lane = zext i32 %lane32 to i64
  %step_place = mul i64 %k, {STEP_VALUES}
  %place = add i64 %step_place, %lane
  %at_value = getelementptr i16, ptr %values, i64 %place
  %value16 = load i16, ptr %at_value, align 2
  %value = zext i16 %value16 to i32
  %value_up = shl i32 %value, 16
  %place32 = trunc i64 %place to i32
  %entry_value = or i32 %value_up, %place32
  %at_entry = getelementptr i32, ptr %tile, i32 %n_next
  store i32 %entry_value, ptr %at_entry, align 1
  br label %escape_end
escape_end:
  br label %escape_test
step_end:
  %k_next = add i64 %k, 1
  %more = icmp ult i64 %k_next, %steps
  br i1 %more, label %step, label %end
end:
  %is_over = icmp ugt i32 %n_step, {MOST_ESCAPES}
  %n_told = select i1 %is_over, i32 {MOST_ESCAPES + 1}, i32 %n_step
  %n_up = shl i32 %n_told, 16
  %first = or i32 %n_up, %base_next
  store i32 %first, ptr %tile, align 1
  ret void
}}"""

_PACK_PLAN = f"""
define internal i64 @plan(ptr %job, i64 %threads) {{
{load_dim("tiles", 0, 0)}
  %more = add i64 %tiles, {_TILES_AT_ONCE - 1}
  %chunks = udiv i64 %more, {_TILES_AT_ONCE}
  ret i64 %chunks
}}"""

_PACK_CHUNK = f"""
define internal void @chunk(ptr %job, i64 %c) {{
entry:
{load_data("values", 0)}
{load_data("packed", 1)}
{load_dim("tiles", 0, 0)}
{load_dim("num", 0, 1)}
{load_dim("bytes", 1, 1)}
  %steps = udiv i64 %num, {STEP_VALUES}
  %first = mul i64 %c, {_TILES_AT_ONCE}
  %to = add i64 %first, {_TILES_AT_ONCE}
  %end_at = call i64 @llvm.umin.i64(i64 %to, i64 %tiles)
  br label %tile
tile:
  %t = phi i64 [%first, %entry], [%t_next, %tile]
  %from = mul i64 %t, %num
  %values_t = getelementptr i16, ptr %values, i64 %from
  %goes = mul i64 %t, %bytes
  %packed_t = getelementptr i8, ptr %packed, i64 %goes
  call void @pack_tile(ptr %values_t, i64 %steps, ptr %packed_t)
  %t_next = add i64 %t, 1
  %more = icmp ult i64 %t_next, %end_at
  br i1 %more, label %tile, label %end
end:
  ret void
}}"""
