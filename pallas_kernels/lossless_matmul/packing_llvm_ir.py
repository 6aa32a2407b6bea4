"""The code that packs: LLVM IR from a matrix's bits to tiles of 12 bits a value, on all cores."""

from __future__ import annotations

from pallas_kernels.llvm.custom_call import handler, load_data, load_dim
from pallas_kernels.llvm.host import HostTarget
from pallas_kernels.llvm.vectors import indices
from pallas_kernels.lossless_matmul.layout import HEADER_BYTES, MOST_ESCAPES, ORDER, STEP_BYTES, STEP_VALUES, WINDOW

_TILES_AT_ONCE = 16  # of a chunk


def module(target: HostTarget) -> str:
    """The IR of the custom call of (values, bits of bfloat16 [tiles, values]) -> (packed tiles [tiles, bytes])."""
    return handler(target, 1, 1, "\n".join([_TILE, _PLAN, _CHUNK]))


# The window with the most values is found from counts of exponents; a sum slides over them.
_TILE = f"""
declare i64 @llvm.cttz.i64(i64, i1)
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
  %base_first = insertelement <64 x i16> poison, i16 %base16, i64 0
  %bases = shufflevector <64 x i16> %base_first, <64 x i16> poison, <64 x i32> zeroinitializer
  %body = getelementptr i8, ptr %tile, i64 {HEADER_BYTES}
  br label %step
step:
  %k = phi i64 [0, %encode], [%k_next, %step_end]
  %n = phi i32 [0, %encode], [%n_step, %step_end]
  %at_values = getelementptr <64 x i16>, ptr %values, i64 %k
  %bits = load <64 x i16>, ptr %at_values, align 2
  %shifted = lshr <64 x i16> %bits, splat (i16 7)
  %exponents = and <64 x i16> %shifted, splat (i16 255)
  %code = sub <64 x i16> %exponents, %bases
  %code_less = sub <64 x i16> %code, splat (i16 1)
  %fits = icmp ult <64 x i16> %code_less, splat (i16 {WINDOW})
  %is_zero = icmp eq <64 x i16> %exponents, zeroinitializer
  %kept = xor <64 x i1> %is_zero, splat (i1 true)
  %has_code = and <64 x i1> %fits, %kept
  %codes = select <64 x i1> %has_code, <64 x i16> %code, <64 x i16> zeroinitializer
  %sound = or <64 x i1> %has_code, %is_zero
  %wrong = xor <64 x i1> %sound, splat (i1 true)
  %sign_down = lshr <64 x i16> %bits, splat (i16 8)
  %sign = and <64 x i16> %sign_down, splat (i16 128)
  %mantissa = and <64 x i16> %bits, splat (i16 127)
  %signs = or <64 x i16> %sign, %mantissa
  %signs_then = trunc <64 x i16> %signs to <64 x i8>
  %signs8 = shufflevector <64 x i8> %signs_then, <64 x i8> poison, <64 x i32> <{indices(ORDER)}>
  %codes_then = trunc <64 x i16> %codes to <64 x i8>
  %low = shufflevector <64 x i8> %codes_then, <64 x i8> poison, <32 x i32> <{indices(ORDER[:32])}>
  %high = shufflevector <64 x i8> %codes_then, <64 x i8> poison, <32 x i32> <{indices(ORDER[32:])}>
  %high_up = shl <32 x i8> %high, splat (i8 4)
  %pairs8 = or <32 x i8> %low, %high_up
  %step_off = mul i64 %k, {STEP_BYTES}
  %at_signs = getelementptr i8, ptr %body, i64 %step_off
  %at_pairs = getelementptr i8, ptr %at_signs, i64 {STEP_VALUES}
  store <64 x i8> %signs8, ptr %at_signs, align 1
  store <32 x i8> %pairs8, ptr %at_pairs, align 1
  %mask = bitcast <64 x i1> %wrong to i64
  br label %escape_test
escape_test:
  %left_mask = phi i64 [%mask, %step], [%mask_next, %escape_end]
  %n_step = phi i32 [%n, %step], [%n_next, %escape_end]
  %is_more = icmp ne i64 %left_mask, 0
  br i1 %is_more, label %escape, label %step_end
escape:
  %lane = call i64 @llvm.cttz.i64(i64 %left_mask, i1 true)
  %mask_less = sub i64 %left_mask, 1
  %mask_next = and i64 %left_mask, %mask_less
  %n_next = add i32 %n_step, 1
  %has_room = icmp ule i32 %n_next, {MOST_ESCAPES}
  br i1 %has_room, label %write, label %escape_end
write:
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

_PLAN = f"""
define internal i64 @plan(ptr %job, i64 %threads) {{
{load_dim("tiles", 0, 0)}
  %more = add i64 %tiles, {_TILES_AT_ONCE - 1}
  %chunks = udiv i64 %more, {_TILES_AT_ONCE}
  ret i64 %chunks
}}"""

_CHUNK = f"""
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
