"""The kernel's code: LLVM IR for a product of rows with a matrix in GGUF's blocks.

Codes are expanded into a buffer that fits the first-level cache, some groups of some panels at a time. A code becomes
an integer as bfloat16 or float32 holds it: its bits in the mantissa of a power of two, so that two values of each of
16 outputs take one shift and one operation of logic. All rows of the chunk are multiplied with that. A group's sums
are multiplied by its scale then, once instead of each value. What the power of two, the zero and the minimum add is the
sum of the row's inputs in the group times one number, so the caller passes these sums. Of rows that are rounded to
integers see `integer_llvm_ir`.
"""

from __future__ import annotations

from pallas_kernels.block_matmul.block_types import BlockType
from pallas_kernels.block_matmul.expansion_llvm_ir import PART_BYTES, SCALE_BYTES, Number, NumberCode, expand, multiplied
from pallas_kernels.block_matmul.integer_llvm_ir import (
    INTEGER_TILES,
    SCALE_ROWS,
    call_of_one_row,
    integer_tile,
    one_row,
    repeated,
    tile_head,
)
from pallas_kernels.block_matmul.layout import tile_bytes
from pallas_kernels.llvm.custom_call import handler, load_data, load_dim, load_number
from pallas_kernels.llvm.host import HostTarget
from pallas_kernels.llvm.vectors import look_up
from pallas_kernels.packed_matmul.llvm_ir import (
    ROWS_AT_ONCE,
    declarations,
    multiply_add,
    pick_tile,
    plan,
    tile_sizes,
    tile_table,
)


def module(kind: BlockType, number: Number, target: HostTarget) -> str:
    """The IR of the custom call of (x, matrices, place) -> (y), with sums after these where the product needs them,
    and with units after those for integers."""
    code = NumberCode(kind, number, target)
    tiles = INTEGER_TILES if code.is_integer else tile_sizes(target)
    tile = integer_tile if code.is_integer else _tile
    functions = [tile(code, rows, panels) for rows, most in tiles.items() for panels in range(1, most + 1)]
    of_type = [look_up(target)] if kind.values else []
    kernel = "\n".join(
        [
            declarations("int8" if number == "int16" else number, target)
            + ("" if number == "float32" or not target.avx512_bf16 else _FUSED),
            "@zeros = internal constant <16 x float> zeroinitializer",
            *of_type,
            *functions,
            expand(code),
            one_row(code, max(tiles.values())) if code.is_integer else "",
            _block(code, tiles),
            plan(tiles, _PANEL),
            _chunk(code, max(tiles.values())),
        ]
    )
    return handler(target, 3 + code.has_sums + code.is_integer, 1, kernel)


_FUSED = "\ndeclare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)"


def _tile(code: NumberCode, rows: int, panels: int) -> str:
    """y[rows, panels * 16] += x[rows, some groups] times what is expanded of the panels; = where it is first."""
    assert code.number != "int16"
    number, cells = code.number, [(i, j) for i in range(rows) for j in range(panels)]
    lines = tile_head(code, rows, panels)
    lines += [f" %g_w = mul i64 %g, {code.expanded_bytes}", f" %g_x = mul i64 %g, {code.step_bytes * code.steps}", " br label %loop"]
    lines += ["loop:", " %k = phi i64 [0, %group], [%next, %loop]"]
    lines += [f" %sum{i}_{j} = phi <16 x float> [zeroinitializer, %group], [%new{i}_{j}, %loop]" for i, j in cells]
    lines += [" %k_w0 = shl i64 %k, 6", " %k_x0 = shl i64 %k, 2", " %k_w = add i64 %k_w0, %g_w", " %k_x = add i64 %k_x0, %g_x"]
    for j in range(panels):
        lines += [f" %at_w{j} = getelementptr i8, ptr %w{j}, i64 %k_w", f" %b{j} = load <16 x i32>, ptr %at_w{j}, align 64"]
    for i in range(rows):
        lines += [f" %at_x{i} = getelementptr i8, ptr %x{i}, i64 %k_x", *repeated(f"a{i}", f"at_x{i}", "i32")]
    for i, j in cells:
        lines += multiply_add(number, code.target, f"%a{i}", f"%b{j}", f"%sum{i}_{j}", f"new{i}_{j}")
    lines += [" %next = add i64 %k, 1", f" %more = icmp ult i64 %next, {code.steps}", " br i1 %more, label %loop, label %group_end"]
    lines += ["group_end:", " %is_not_first = icmp ne i64 %g, 0", " %adds = select i1 %is_first, i1 %is_not_first, i1 true"]
    lines += [f" %g_scale = mul i64 %g, {SCALE_BYTES}", " %g_sum = shl i64 %g, 2"]
    for j in range(panels):
        lines += [f" %at_s{j} = getelementptr i8, ptr %scales{j}, i64 %g_scale", f" %s{j} = load <16 x float>, ptr %at_s{j}, align 64"]
        if code.has_added:
            lines += [f" %at_c{j} = getelementptr i8, ptr %at_s{j}, i64 64", f" %c{j} = load <16 x float>, ptr %at_c{j}, align 64"]
    if code.has_added:
        for i in range(rows):
            lines += [f" %at_t{i} = getelementptr i8, ptr %sums{i}, i64 %g_sum", *repeated(f"t{i}", f"at_t{i}", "float")]
    for i, j in cells:
        cell, product = f"{i}_{j}", f"%scaled{i}_{j}"
        lines += [
            f" %at_before{cell} = select i1 %adds, ptr %at_y{cell}, ptr @zeros",  # y may never have been touched
            f" %before{cell} = load <16 x float>, ptr %at_before{cell}, align 4",
            f" {product} = {multiplied(f'%new{cell}', f'%s{j}', f'%before{cell}')}",
        ]
        if code.has_added:
            lines += [f" %whole{cell} = {multiplied(f'%t{i}', f'%c{j}', product)}"]
            product = f"%whole{cell}"
        lines += [f" store <16 x float> {product}, ptr %at_y{cell}, align 4"]
    lines += [" %g_next = add i64 %g, 1", " %more_groups = icmp ult i64 %g_next, %groups", " br i1 %more_groups, label %group, label %end"]
    return "\n".join([*lines, "end:", " ret void", "}"])


def _block(code: NumberCode, tiles: dict[int, int]) -> str:
    """y[rows, panels * 16] = x times the panels: some panels by some groups at a time, expanded once for all rows."""
    kind, widest = code.kind, max(tiles.values())
    return f"""
{tile_table(tiles)}
define internal void @block(ptr %x, i64 %rows, i64 %segments, ptr %w, ptr %y, i64 %outputs, i64 %panels, ptr %sums, ptr %units, ptr %expanded, ptr %scales) {{
entry:
  %is_one = icmp eq i64 %rows, 1
  %is_tall = icmp uge i64 %rows, {max(tiles)}
  %width = select i1 %is_tall, i64 {tiles[max(tiles)]}, i64 {widest}
  %groups = mul i64 %segments, {kind.groups}
  %x_row = mul i64 %groups, {code.step_bytes * code.steps}
  %sums_row = shl i64 %groups, 2
  %w_panel = mul i64 %segments, {tile_bytes(kind)}
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
  {"br i1 %is_one, label %one_row, label %part" if code.is_integer else "br label %part"}
{call_of_one_row(widest) if code.is_integer else ""}
part:
  %from = phi i64 [0, %columns], [%from_next, %part_end]
  %groups_left = sub i64 %groups, %from
  %count = call i64 @llvm.umin.i64(i64 %groups_left, i64 {code.groups_at_once})
  br label %unpack
unpack:
  %u = phi i64 [0, %part], [%u_next, %unpack]
  %u_off = mul i64 %u, %w_panel
  %w_u = getelementptr i8, ptr %w_p, i64 %u_off
  %out_off = mul i64 %u, {PART_BYTES}
  %out = getelementptr i8, ptr %expanded, i64 %out_off
  %scale_off = mul i64 %u, {code.groups_at_once * SCALE_BYTES}
  %out_scale = getelementptr i8, ptr %scales, i64 %scale_off
  call void @expand(ptr %w_u, i64 %from, i64 %count, ptr %out, ptr %out_scale)
  %u_next = add i64 %u, 1
  %more_panels = icmp ult i64 %u_next, %num
  br i1 %more_panels, label %unpack, label %multiply
multiply:
  %is_first = icmp eq i64 %from, 0
  %x_before = mul i64 %from, {code.step_bytes * code.steps}
  %x_s = getelementptr i8, ptr %x, i64 %x_before
  %sums_s = getelementptr float, ptr %sums, i64 %from
  br label %tile
tile:
  %r = phi i64 [0, %multiply], [%r_next, %tile]
  %rows_left = sub i64 %rows, %r
{pick_tile(tiles)}
  %x_off = mul i64 %r, %x_row
  %x_r = getelementptr i8, ptr %x_s, i64 %x_off
  %sums_off = mul i64 %r, %sums_row
  %sums_r = getelementptr i8, ptr %sums_s, i64 %sums_off
  %y_r_off = mul i64 %r, %y_row
  %y_r = getelementptr i8, ptr %y_p, i64 %y_r_off
  call void %function(ptr %x_r, i64 %count, ptr %expanded, ptr %y_r, i64 %outputs, ptr %scales, ptr %sums_r, i64 %x_row, i64 {
        PART_BYTES
    }, i64 {code.groups_at_once * SCALE_BYTES}, i64 %sums_row, i1 %is_first)
  %r_next = add i64 %r, %tile_rows
  %more_rows = icmp ult i64 %r_next, %rows
  br i1 %more_rows, label %tile, label %part_end
part_end:
  %from_next = add i64 %from, %count
  %more_parts = icmp ult i64 %from_next, %groups
  br i1 %more_parts, label %part, label %{"scale_row" if code.is_integer else "columns_end"}
{SCALE_ROWS if code.is_integer else ""}columns_end:
  %p_next = add i64 %p, %num
  %more = icmp ult i64 %p_next, %panels
  br i1 %more, label %columns, label %end
end:
  ret void
}}"""


_PANEL = f"""{load_dim("segments", 1, 2)}
{load_dim("bytes", 1, 3)}
  %panel = mul i64 %segments, %bytes"""


def _chunk(code: NumberCode, most_panels: int) -> str:
    sums = (
        f"""
{load_data("all_sums", 3)}
  %groups = mul i64 %segments, {code.kind.groups}
  %sums_place = mul i64 %row, %groups
  %sums = getelementptr float, ptr %all_sums, i64 %sums_place"""
        if code.has_sums
        else "  %sums = getelementptr i8, ptr %x, i64 0  ; not read"
    )
    units = (
        f"""
{load_data("all_units", 4)}
  %units = getelementptr float, ptr %all_units, i64 %row"""
        if code.is_integer
        else "  %units = getelementptr i8, ptr %x, i64 0  ; not read"
    )
    return f"""
define internal void @chunk(ptr %job, i64 %c) {{
{load_data("x", 0)}
{load_data("matrices", 1)}
{load_data("place_data", 2)}
{load_data("y", 3 + code.has_sums + code.is_integer)}
{load_dim("rows", 0, 0)}
{load_dim("inputs", 0, 1)}
{load_dim("panels", 1, 1)}
{_PANEL}
{load_number("size", 0)}
{load_number("across", 1)}
  %outputs = shl i64 %panels, 4
  %place32 = load i32, ptr %place_data
  %place = zext i32 %place32 to i64
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
  %x_c = getelementptr {"i32" if code.number == "float32" else "i16"}, ptr %x, i64 %x_place
{sums}
{units}
  %w_off = mul i64 %first, %panel
  %w_c = getelementptr i8, ptr %w, i64 %w_off
  %y_row = mul i64 %row, %outputs
  %y_column = shl i64 %first, 4
  %y_place = add i64 %y_row, %y_column
  %y_c = getelementptr i32, ptr %y, i64 %y_place
  %expanded = alloca [{most_panels * PART_BYTES} x i8], align 64
  %scales = alloca [{most_panels * code.groups_at_once * SCALE_BYTES} x i8], align 64
  call void @block(ptr %x_c, i64 %rows_here, i64 %segments, ptr %w_c, ptr %y_c, i64 %outputs, i64 %panels_here, ptr %sums, ptr %units, ptr %expanded, ptr %scales)
  ret void
}}"""
