"""The part of the kernel's code that multiplies integers: rows of two 8-bit parts by codes as bytes, with VNNI.

A group's products are exact: integers are added to its scale's multiple only once. What codes have added is taken off
by the sums of inputs, in integers too. The unit of a row is multiplied last.
"""

from __future__ import annotations

from pallas_kernels.block_matmul.expansion_llvm_ir import SCALE_BYTES, NumberCode, bytes_of_codes, multiplied, prefetches, scales
from pallas_kernels.block_matmul.layout import group_bytes, header_bytes, tile_bytes
from pallas_kernels.packed_matmul.llvm_ir import multiply_add

# Rows of a tile -> panels of it at most: two sums each stay in registers.
INTEGER_TILES = {4: 3, 2: 4, 1: 4}


def integer_tile(code: NumberCode, rows: int, panels: int) -> str:
    """y[rows, panels * 16] += x[rows, some groups] times what is expanded of the panels; = where it is first. In units
    of the rows."""
    cells, lines = [(i, j) for i in range(rows) for j in range(panels)], tile_head(code, rows, panels)
    lines += [f" %g_w = mul i64 %g, {code.expanded_bytes}", f" %g_x = mul i64 %g, {8 * code.steps}", " %g_sum = shl i64 %g, 2"]
    added = code.offset + code.kind.zero
    for i in range(rows):
        lines += [f" %at_t{i} = getelementptr i8, ptr %sums{i}, i64 %g_sum", f" %total{i} = load i32, ptr %at_t{i}, align 4"]
        lines += [f" %less{i} = mul i32 %total{i}, {-added}", *_spread(f"start{i}", f"%less{i}", "i32")]
    for i, j in cells:
        lines += [
            f" %high0_{i}_{j} = add <16 x i32> zeroinitializer, zeroinitializer",
            f" %low0_{i}_{j} = add <16 x i32> %start{i}, zeroinitializer",
        ]
    for step in range(code.steps):
        lines += [f" %k_w{step} = add i64 %g_w, {64 * step}", f" %k_x{step} = add i64 %g_x, {8 * step}"]
        for j in range(panels):
            lines += [
                f" %at_w{step}_{j} = getelementptr i8, ptr %w{j}, i64 %k_w{step}",
                f" %b{step}_{j} = load <16 x i32>, ptr %at_w{step}_{j}, align 64",
            ]
        for i in range(rows):
            for part in range(2):
                name = f"{step}_{i}_{part}"
                lines += [
                    f" %at_x{name} = getelementptr i8, ptr %x{i}, i64 %k_x{step}",
                    f" %at_p{name} = getelementptr i8, ptr %at_x{name}, i64 {4 * part}",
                ]
                lines += repeated(f"a{name}", f"at_p{name}", "i32")
        for i, j in cells:
            for part, name in enumerate(("high", "low")):
                lines += multiply_add(
                    "int8", code.target, f"%a{step}_{i}_{part}", f"%b{step}_{j}", f"%{name}{step}_{i}_{j}", f"{name}{step + 1}_{i}_{j}"
                )
    lines += [
        " br label %group_end",
        "group_end:",
        " %is_not_first = icmp ne i64 %g, 0",
        " %adds = select i1 %is_first, i1 %is_not_first, i1 true",
        f" %g_scale = mul i64 %g, {SCALE_BYTES}",
    ]
    for j in range(panels):
        lines += [f" %at_s{j} = getelementptr i8, ptr %scales{j}, i64 %g_scale", f" %s{j} = load <16 x float>, ptr %at_s{j}, align 64"]
        if code.has_added:
            lines += [f" %at_c{j} = getelementptr i8, ptr %at_s{j}, i64 64", f" %c{j} = load <16 x float>, ptr %at_c{j}, align 64"]
    if code.has_added:
        for i in range(rows):
            lines += [f" %total_float{i} = sitofp i32 %total{i} to float", *_spread(f"t{i}", f"%total_float{i}", "float")]
    for i, j in cells:
        cell, product = f"{i}_{j}", f"%scaled{i}_{j}"
        lines += [
            f" %raised{cell} = shl <16 x i32> %high{code.steps}_{cell}, splat (i32 8)",
            f" %whole{cell} = add <16 x i32> %raised{cell}, %low{code.steps}_{cell}",
            f" %new{cell} = sitofp <16 x i32> %whole{cell} to <16 x float>",
            f" %at_before{cell} = select i1 %adds, ptr %at_y{cell}, ptr @zeros",  # y may never have been touched
            f" %before{cell} = load <16 x float>, ptr %at_before{cell}, align 4",
            f" {product} = {multiplied(f'%new{cell}', f'%s{j}', f'%before{cell}')}",
        ]
        if code.has_added:
            lines += [f" %with_minimum{cell} = {multiplied(f'%t{i}', f'%c{j}', product)}"]
            product = f"%with_minimum{cell}"
        lines += [f" store <16 x float> {product}, ptr %at_y{cell}, align 4"]
    lines += [" %g_next = add i64 %g, 1", " %more_groups = icmp ult i64 %g_next, %groups", " br i1 %more_groups, label %group, label %end"]
    return "\n".join([*lines, "end:", " ret void", "}"])


def one_row(code: NumberCode, most_panels: int) -> str:
    """@one_row_N: y[16 N] = one row times N panels, whose codes go from memory into the product: their loads are spread
    over its time, where memory is slower than both. The sums are those of `integer_tile`, in its order."""
    kind = code.kind
    lines, scale, added = scales(code)
    codes, steps = bytes_of_codes(kind)
    group = [*lines, *codes, f"  %taken = mul i32 %total, {-(code.offset + kind.zero)}", *_spread("low_0", "%taken", "i32")]
    group.append("  %high_0 = add <16 x i32> zeroinitializer, zeroinitializer")
    for step, found in enumerate(steps):
        for part, name in enumerate(("high", "low")):
            group += [
                f"  %at_{name}{step} = getelementptr i8, ptr %x, i64 {8 * step + 4 * part}",
                *repeated(f"a_{name}{step}", f"at_{name}{step}", "i32"),
            ]
            group += multiply_add("int8", code.target, f"%a_{name}{step}", found, f"%{name}_{step}", f"{name}_{step + 1}")
    group += [
        f"  %raised = shl <16 x i32> %high_{len(steps)}, splat (i32 8)",
        f"  %whole = add <16 x i32> %raised, %low_{len(steps)}",
        "  %number = sitofp <16 x i32> %whole to <16 x float>",
        f"  %product = {multiplied('%number', scale, '%before')}",
    ]
    result = "%product"
    if added is not None:
        group += [
            "  %total_float = sitofp i32 %total to float",
            *_spread("t", "%total_float", "float"),
            f"  %sum = {multiplied('%t', added, result)}",
        ]
        result = "%sum"
    functions = [
        f"""
define internal <16 x float> @group(ptr %panel, i64 %tile_off, i64 %sub, i64 %codes_off, ptr %x, i32 %total, <16 x float> %before) alwaysinline {{
  %at_tile = getelementptr i8, ptr %panel, i64 %tile_off
  %at_codes = getelementptr i8, ptr %at_tile, i64 %codes_off
{prefetches(code)}
{chr(10).join(group)}
  ret <16 x float> {result}
}}"""
    ]
    return "\n".join([*functions, *(_row_of_panels(code, panels) for panels in range(1, most_panels + 1))])


def _row_of_panels(code: NumberCode, panels: int) -> str:
    kind, each = code.kind, range(panels)
    pointers = "\n".join(f"  %off{j} = mul i64 %w_panel, {j}\n  %w{j} = getelementptr i8, ptr %w, i64 %off{j}" for j in each)
    before = "\n".join(f"  %sum{j} = phi <16 x float> [zeroinitializer, %entry], [%new{j}, %group]" for j in each)
    sums = "\n".join(
        f"  %new{j} = call <16 x float> @group(ptr %w{j}, i64 %tile_off, i64 %sub, i64 %codes_off, ptr %x_g, i32 %total, <16 x float> %sum{j})"
        for j in each
    )
    stores = "\n".join(
        f"  %scaled{j} = fmul <16 x float> %new{j}, %units\n  %at{j} = getelementptr i8, ptr %y, i64 {64 * j}\n"
        f"  store <16 x float> %scaled{j}, ptr %at{j}, align 4"
        for j in each
    )
    return f"""
define internal void @one_row_{panels}(ptr %x, i64 %groups, ptr %w, i64 %w_panel, ptr %y, ptr %sums, ptr %unit_at) {{
entry:
{pointers}
  br label %group
group:
  %g = phi i64 [0, %entry], [%g_next, %group]
{before}
  %tile = udiv i64 %g, {kind.groups}
  %sub = urem i64 %g, {kind.groups}
  %tile_off = mul i64 %tile, {tile_bytes(kind)}
  %codes_off0 = mul i64 %sub, {group_bytes(kind)}
  %codes_off = add i64 %codes_off0, {header_bytes(kind)}
  %x_off = mul i64 %g, {8 * code.steps}
  %x_g = getelementptr i8, ptr %x, i64 %x_off
  %total_at = getelementptr i32, ptr %sums, i64 %g
  %total = load i32, ptr %total_at, align 4
{sums}
  %g_next = add i64 %g, 1
  %more = icmp ult i64 %g_next, %groups
  br i1 %more, label %group, label %end
end:
  %unit = load float, ptr %unit_at, align 4
  %first_unit = insertelement <16 x float> poison, float %unit, i64 0
  %units = shufflevector <16 x float> %first_unit, <16 x float> poison, <16 x i32> zeroinitializer
{stores}
  ret void
}}"""


def call_of_one_row(most_panels: int) -> str:
    """In `@block`: the blocks that take %num panels by one row."""
    cases = " ".join(f"i64 {panels}, label %one_row_{panels}" for panels in range(1, most_panels + 1))
    blocks = "\n".join(
        f"one_row_{panels}:\n  call void @one_row_{panels}(ptr %x, i64 %groups, ptr %w_p, i64 %w_panel, ptr %y_p, ptr %sums, ptr %units)\n"
        "  br label %columns_end"
        for panels in range(1, most_panels + 1)
    )
    return f"one_row:\n  switch i64 %num, label %columns_end [{cases}]\n{blocks}"


# In `@block`, of some panels by all rows: y times the rows' units.
SCALE_ROWS = """scale_row:
  %s_row = phi i64 [0, %part_end], [%s_row_next, %scale_row_end]
  %unit_at = getelementptr float, ptr %units, i64 %s_row
  %unit = load float, ptr %unit_at, align 4
  %first_unit = insertelement <16 x float> poison, float %unit, i64 0
  %of_units = shufflevector <16 x float> %first_unit, <16 x float> poison, <16 x i32> zeroinitializer
  %s_off = mul i64 %s_row, %y_row
  %s_at_row = getelementptr i8, ptr %y_p, i64 %s_off
  br label %scale_panel
scale_panel:
  %s_panel = phi i64 [0, %scale_row], [%s_panel_next, %scale_panel]
  %s_panel_off = shl i64 %s_panel, 6
  %s_at = getelementptr i8, ptr %s_at_row, i64 %s_panel_off
  %in_units = load <16 x float>, ptr %s_at, align 4
  %scaled = fmul <16 x float> %in_units, %of_units
  store <16 x float> %scaled, ptr %s_at, align 4
  %s_panel_next = add i64 %s_panel, 1
  %more_scale_panels = icmp ult i64 %s_panel_next, %num
  br i1 %more_scale_panels, label %scale_panel, label %scale_row_end
scale_row_end:
  %s_row_next = add i64 %s_row, 1
  %more_scale_rows = icmp ult i64 %s_row_next, %rows
  br i1 %more_scale_rows, label %scale_row, label %columns_end
"""


def tile_head(code: NumberCode, rows: int, panels: int) -> list[str]:
    """A tile's function up to the beginning of its loop over groups: where each row's and each panel's things lie."""
    cells = [(i, j) for i in range(rows) for j in range(panels)]
    lines = [
        f"define internal void @tile_{rows}_{panels}(ptr %x, i64 %groups, ptr %w, ptr %y, i64 %outputs, ptr %scales, ptr %sums, "
        "i64 %row, i64 %panel, i64 %scale_panel, i64 %sums_row, i1 %is_first) {",
        "entry:",
        " %y_row = shl i64 %outputs, 2",
    ]
    pointers = [("x", "row", rows), ("w", "panel", panels), ("y", "y_row", rows), ("scales", "scale_panel", panels)]
    for name, stride, count in [*pointers, *([("sums", "sums_row", rows)] if code.has_sums else [])]:
        for i in range(count):
            lines += [f" %{name}_off{i} = mul i64 %{stride}, {i}", f" %{name}{i} = getelementptr i8, ptr %{name}, i64 %{name}_off{i}"]
    lines += [f" %at_y{i}_{j} = getelementptr i8, ptr %y{i}, i64 {64 * j}" for i, j in cells]
    return [*lines, " br label %group", "group:", " %g = phi i64 [0, %entry], [%g_next, %group_end]"]


def repeated(name: str, at: str, of_type: str) -> list[str]:
    """%name: 16 times what is at %at."""
    return [f" %one_{name} = load {of_type}, ptr %{at}, align 4", *_spread(name, f"%one_{name}", of_type)]


def _spread(name: str, value: str, of_type: str) -> list[str]:
    return [
        f" %first_{name} = insertelement <16 x {of_type}> poison, {of_type} {value}, i64 0",
        f" %{name} = shufflevector <16 x {of_type}> %first_{name}, <16 x {of_type}> poison, <16 x i32> zeroinitializer",
    ]
