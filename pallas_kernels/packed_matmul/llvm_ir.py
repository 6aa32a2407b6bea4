"""The kernel's code: LLVM IR for a product of rows with a packed matrix.

A tile is up to 8 rows by 3 panels of 16 outputs. Its sums stay in registers during a loop over the inputs, 4 bytes of
them at a time: one float32, two bfloat16 or four int8. A chunk is some panels by some rows. The integers of the matrix
have 128 added. So sums of integers start at minus what that adds to them.
"""

from __future__ import annotations

from typing import Literal

from pallas_kernels.llvm.custom_call import handler, load_data, load_dim, load_number, store_number
from pallas_kernels.llvm.host import HostTarget
from pallas_kernels.packed_matmul.layout import ZERO

Kind = Literal["float32", "bfloat16", "int8"]

ROWS_AT_ONCE = 128  # of a chunk: their inputs stay in the second-level cache during the loop over panels
CHUNK_BYTES = 1 << 18  # of matrix
_BYTES_AHEAD = 2048  # of each panel, from what is read to what is prefetched: a processor stops at the end of each 4 KB


def module(kind: Kind, target: HostTarget) -> str:
    """The IR of one kind's custom call, of (x, matrices, place) -> (y)."""
    tiles = tile_sizes(target)
    functions = [tile(kind, target, rows, panels) for rows, most in tiles.items() for panels in range(1, most + 1)]
    start = _start(target) if kind == "int8" else _NO_START
    kernel = "\n".join([declarations(kind, target), *functions, start, _block(tiles), plan(tiles, _PANEL), _CHUNK])
    return handler(target, 3, 1, kernel)


def tile_sizes(target: HostTarget) -> dict[int, int]:
    """Rows of a tile -> panels of it at most: as many sums as registers hold."""
    return {8: 3, 4: 4, 2: 4, 1: 4} if target.avx512 else {4: 1, 2: 1, 1: 1}


def declarations(kind: Kind, target: HostTarget) -> str:
    return f"declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n{_of_products(kind, target)}"


def _of_products(kind: Kind, target: HostTarget) -> str:
    lanes = _vnni_lanes(target)
    if kind == "int8":
        return (
            f"declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, {lanes}, {lanes})\n"
            "declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)"
        )
    if kind == "bfloat16" and target.avx512_bf16:
        return "declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)"
    return "declare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)"


def _vnni_lanes(target: HostTarget) -> str:
    return "<64 x i8>" if target.llvm_version >= 22 else "<16 x i32>"


def tile(kind: Kind, target: HostTarget, rows: int, panels: int, *, goes_on: bool = False) -> str:
    """y[rows, panels * 16] = start[rows] + x[rows, :] times the panels. `steps`: inputs in groups of 4 bytes;
    `outputs`: of y's rows. `goes_on`: x and the panels may be parts of longer ones, with `row` and `panel` bytes from
    one to the next, and where `is_first` is false what they give is added to y; for floats."""
    sums = "<16 x i32>" if kind == "int8" else "<16 x float>"
    cells = [(i, j) for i in range(rows) for j in range(panels)]
    more = ", i64 %row, i64 %panel, i1 %is_first" if goes_on else ""
    lines = [
        f"define internal void @tile_{rows}_{panels}(ptr %x, i64 %steps, ptr %w, ptr %y, i64 %outputs, ptr %start{more}) {{",
        "entry:",
        *([] if goes_on else [" %row = shl i64 %steps, 2", " %panel = shl i64 %steps, 6"]),
        " %y_row = shl i64 %outputs, 2",
    ]
    for name, stride, count in (("x", "row", rows), ("w", "panel", panels), ("y", "y_row", rows)):
        for i in range(count):
            lines += [f" %{name}_off{i} = mul i64 %{stride}, {i}", f" %{name}{i} = getelementptr i8, ptr %{name}, i64 %{name}_off{i}"]
    if kind == "int8":
        for i in range(rows):
            lines += [
                f" %at_start{i} = getelementptr i32, ptr %start, i64 {i}",
                f" %start_of{i} = load i32, ptr %at_start{i}",
                f" %first_start{i} = insertelement <16 x i32> poison, i32 %start_of{i}, i64 0",
                f" %start{i} = shufflevector <16 x i32> %first_start{i}, <16 x i32> poison, <16 x i32> zeroinitializer",
            ]
    lines += [f" %at_y{i}_{j} = getelementptr i8, ptr %y{i}, i64 {64 * j}" for i, j in cells]
    starts = {(i, j): f"%start{i}" if kind == "int8" else f"%before{i}_{j}" if goes_on else "zeroinitializer" for i, j in cells}
    if goes_on:
        for i, j in cells:
            lines += [
                f" %stored{i}_{j} = load {sums}, ptr %at_y{i}_{j}, align 4",
                f" %before{i}_{j} = select i1 %is_first, {sums} zeroinitializer, {sums} %stored{i}_{j}",
            ]
    lines += [" br label %loop", "loop:", " %k = phi i64 [0, %entry], [%next, %loop]"]
    lines += [f" %sum{i}_{j} = phi {sums} [{starts[i, j]}, %entry], [%new{i}_{j}, %loop]" for i, j in cells]
    lines += [" %k_w = shl i64 %k, 6", " %k_x = shl i64 %k, 2"]
    for j in range(panels):
        lines += [
            f" %at_w{j} = getelementptr i8, ptr %w{j}, i64 %k_w",
            f" %b{j} = load <16 x i32>, ptr %at_w{j}, align 4",
        ]
        if not goes_on:
            lines += [
                f" %ahead{j} = getelementptr i8, ptr %at_w{j}, i64 {_BYTES_AHEAD}",
                f" call void @llvm.prefetch.p0(ptr %ahead{j}, i32 0, i32 3, i32 1)",
            ]
    for i in range(rows):
        lines += [
            f" %at_x{i} = getelementptr i8, ptr %x{i}, i64 %k_x",
            f" %one{i} = load i32, ptr %at_x{i}, align 4",
            f" %first{i} = insertelement <16 x i32> poison, i32 %one{i}, i64 0",
            f" %a{i} = shufflevector <16 x i32> %first{i}, <16 x i32> poison, <16 x i32> zeroinitializer",
        ]
    for i, j in cells:
        lines += multiply_add(kind, target, f"%a{i}", f"%b{j}", f"%sum{i}_{j}", f"new{i}_{j}")
    lines += [" %next = add i64 %k, 1", " %more = icmp ult i64 %next, %steps", " br i1 %more, label %loop, label %end", "end:"]
    lines += [f" store {sums} %new{i}_{j}, ptr %at_y{i}_{j}, align 4" for i, j in cells]
    return "\n".join([*lines, " ret void", "}"])


def multiply_add(kind: Kind, target: HostTarget, a: str, b: str, before: str, after: str) -> list[str]:
    """%after = before + a row's group of inputs, a, times those of a panel's 16 outputs, b."""
    cell = after
    if kind == "float32":
        return [
            f" %af{cell} = bitcast <16 x i32> {a} to <16 x float>",
            f" %bf{cell} = bitcast <16 x i32> {b} to <16 x float>",
            f" %{after} = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %af{cell}, <16 x float> %bf{cell}, <16 x float> {before})",
        ]
    if kind == "int8":  # the matrix is unsigned, x signed
        lanes = _vnni_lanes(target)
        return [
            f" %ai{cell} = bitcast <16 x i32> {a} to {lanes}",
            f" %bi{cell} = bitcast <16 x i32> {b} to {lanes}",
            f" %{after} = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> {before}, {lanes} %bi{cell}, {lanes} %ai{cell})",
        ]
    if target.avx512_bf16:
        return [
            f" %ah{cell} = bitcast <16 x i32> {a} to <32 x bfloat>",
            f" %bh{cell} = bitcast <16 x i32> {b} to <32 x bfloat>",
            f" %{after} = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> {before}, <32 x bfloat> %ah{cell}, <32 x bfloat> %bh{cell})",
        ]
    lines, last = [], f"{before}"  # a bfloat16 is the upper half of a float32
    for half, operation in (("lo", "shl <16 x i32> {}, splat (i32 16)"), ("hi", "and <16 x i32> {}, splat (i32 -65536)")):
        for name, value in (("a", a), ("b", b)):
            lines += [
                f" %{name}{half}i{cell} = {operation.format(value)}",
                f" %{name}{half}{cell} = bitcast <16 x i32> %{name}{half}i{cell} to <16 x float>",
            ]
        result = f"%{after}" if half == "hi" else f"%half{cell}"
        lines.append(
            f" {result} = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %a{half}{cell}, <16 x float> %b{half}{cell}, <16 x float> {last})"
        )
        last = result
    return lines


_NO_START = """
define internal void @start(ptr %x, i64 %rows, i64 %steps, ptr %start) alwaysinline {
  ret void
}"""


def _start(target: HostTarget) -> str:
    """start[rows] = -128 times the sum of each row of x: 16 groups at a time, then one by one."""
    lanes = _vnni_lanes(target)
    zeros = f"<16 x i32> splat (i32 {int.from_bytes(bytes([ZERO] * 4), 'little', signed=True)})"
    return f"""
define internal void @start(ptr %x, i64 %rows, i64 %steps, ptr %start) {{
entry:
  %wholes = lshr i64 %steps, 4
  %end_of_wholes = shl i64 %wholes, 4
  %zeros = bitcast {zeros} to {lanes}
  br label %row
row:
  %r = phi i64 [0, %entry], [%r_next, %row_end]
  %place = mul i64 %r, %steps
  %x_r = getelementptr i32, ptr %x, i64 %place
  br label %whole_test
whole_test:
  %k = phi i64 [0, %row], [%k_next, %whole]
  %sum = phi <16 x i32> [zeroinitializer, %row], [%sum_next, %whole]
  %is_whole = icmp ult i64 %k, %end_of_wholes
  br i1 %is_whole, label %whole, label %group_test
whole:
  %at_16 = getelementptr i32, ptr %x_r, i64 %k
  %x_16 = load <16 x i32>, ptr %at_16, align 4
  %x_lanes = bitcast <16 x i32> %x_16 to {lanes}
  %sum_next = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %sum, {lanes} %zeros, {lanes} %x_lanes)
  %k_next = add i64 %k, 16
  br label %whole_test
group_test:
  %g = phi i64 [%k, %whole_test], [%g_next, %group]
  %total = phi <16 x i32> [%sum, %whole_test], [%total_next, %group]
  %is_left = icmp ult i64 %g, %steps
  br i1 %is_left, label %group, label %row_end
group:
  %at_1 = getelementptr i32, ptr %x_r, i64 %g
  %x_1 = load i32, ptr %at_1, align 4
  %x_first = insertelement <16 x i32> zeroinitializer, i32 %x_1, i64 0
  %x_first_lanes = bitcast <16 x i32> %x_first to {lanes}
  %total_next = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %total, {lanes} %zeros, {lanes} %x_first_lanes)
  %g_next = add i64 %g, 1
  br label %group_test
row_end:
  %all = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %total)
  %less = sub i32 0, %all
  %at_start = getelementptr i32, ptr %start, i64 %r
  store i32 %less, ptr %at_start
  %r_next = add i64 %r, 1
  %more = icmp ult i64 %r_next, %rows
  br i1 %more, label %row, label %end
end:
  ret void
}}"""


def _block(tiles: dict[int, int]) -> str:
    """y[rows, panels * 16] = x times the panels, tile by tile: all rows while some panels are in the first-level
    cache."""
    return f"""
{tile_table(tiles)}
define internal void @block(ptr %x, i64 %rows, i64 %steps, ptr %w, ptr %y, i64 %outputs, i64 %panels, ptr %start) {{
entry:
  %is_tall = icmp uge i64 %rows, {max(tiles)}
  %width = select i1 %is_tall, i64 {tiles[max(tiles)]}, i64 {max(tiles.values())}
  %x_row = shl i64 %steps, 2
  %panel = shl i64 %steps, 6
  %y_row = shl i64 %outputs, 2
  br label %columns
columns:
  %p = phi i64 [0, %entry], [%p_next, %columns_end]
  %panels_left = sub i64 %panels, %p
  %is_last = icmp ult i64 %panels_left, %width
  %num = select i1 %is_last, i64 %panels_left, i64 %width
  %w_off = mul i64 %p, %panel
  %w_p = getelementptr i8, ptr %w, i64 %w_off
  %y_off = shl i64 %p, 6
  %y_p = getelementptr i8, ptr %y, i64 %y_off
  br label %tile
tile:
  %r = phi i64 [0, %columns], [%r_next, %tile]
  %rows_left = sub i64 %rows, %r
{pick_tile(tiles)}
  %x_off = mul i64 %r, %x_row
  %x_r = getelementptr i8, ptr %x, i64 %x_off
  %y_r_off = mul i64 %r, %y_row
  %y_r = getelementptr i8, ptr %y_p, i64 %y_r_off
  %start_r = getelementptr i32, ptr %start, i64 %r
  call void %function(ptr %x_r, i64 %steps, ptr %w_p, ptr %y_r, i64 %outputs, ptr %start_r)
  %r_next = add i64 %r, %tile_rows
  %more_rows = icmp ult i64 %r_next, %rows
  br i1 %more_rows, label %tile, label %columns_end
columns_end:
  %p_next = add i64 %p, %num
  %more = icmp ult i64 %p_next, %panels
  br i1 %more, label %columns, label %end
end:
  ret void
}}"""


def tile_table(tiles: dict[int, int]) -> str:
    """@tiles: the functions, rows by rows, each for one panel, two, ..."""
    widest = max(tiles.values())
    pointers = ", ".join(
        f"ptr @tile_{rows}_{panels}" if panels <= tiles[rows] else "ptr null" for rows in sorted(tiles) for panels in range(1, widest + 1)
    )
    return f"@tiles = internal constant [{len(tiles) * widest} x ptr] [{pointers}]"


def pick_tile(tiles: dict[int, int]) -> str:
    """Sets %function to the tallest tile of %num panels that %rows_left have room for, and %tile_rows to its rows."""
    sizes, widest = sorted(tiles), max(tiles.values())
    pick = ["  %size0 = add i64 0, 1", "  %place0 = add i64 0, 0"]
    for place, rows in enumerate(sizes[1:], 1):
        pick += [
            f"  %fits{place} = icmp uge i64 %rows_left, {rows}",
            f"  %size{place} = select i1 %fits{place}, i64 {rows}, i64 %size{place - 1}",
            f"  %place{place} = select i1 %fits{place}, i64 {place * widest}, i64 %place{place - 1}",
        ]
    last = len(sizes) - 1
    pick += [
        f"  %tile_rows = add i64 %size{last}, 0",
        "  %column = add i64 %num, -1",
        f"  %index = add i64 %place{last}, %column",
        "  %slot = getelementptr ptr, ptr @tiles, i64 %index",
        "  %function = load ptr, ptr %slot",
    ]
    return "\n".join(pick)


def plan(tiles: dict[int, int], panel: str) -> str:
    """A chunk has whole tiles of panels: at most `CHUNK_BYTES`, and few enough that each thread has at least two
    chunks. `panel`: IR that sets %panel to the bytes of one. x and the matrices are the first arguments."""
    tallest = max(tiles)
    return f"""
define internal i64 @plan(ptr %job, i64 %threads) {{
{load_dim("rows", 0, 0)}
{load_dim("panels", 1, 1)}
{panel}
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


_PANEL = f"""{load_dim("steps", 1, 2)}
  %panel = shl i64 %steps, 6"""

_CHUNK = f"""
define internal void @chunk(ptr %job, i64 %c) {{
{load_data("x", 0)}
{load_data("matrices", 1)}
{load_data("place_data", 2)}
{load_data("y", 3)}
{load_dim("rows", 0, 0)}
{load_dim("panels", 1, 1)}
{load_dim("steps", 1, 2)}
{load_number("size", 0)}
{load_number("across", 1)}
  %outputs = shl i64 %panels, 4
  %place32 = load i32, ptr %place_data
  %place = zext i32 %place32 to i64
  %panel = shl i64 %steps, 6
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
  %x_place = mul i64 %row, %steps
  %x_c = getelementptr i32, ptr %x, i64 %x_place
  %w_off = mul i64 %first, %panel
  %w_c = getelementptr i8, ptr %w, i64 %w_off
  %y_row = mul i64 %row, %outputs
  %y_column = shl i64 %first, 4
  %y_place = add i64 %y_row, %y_column
  %y_c = getelementptr i32, ptr %y, i64 %y_place
  %start = alloca [{ROWS_AT_ONCE} x i32]
  call void @start(ptr %x_c, i64 %rows_here, i64 %steps, ptr %start)
  call void @block(ptr %x_c, i64 %rows_here, i64 %steps, ptr %w_c, ptr %y_c, i64 %outputs, i64 %panels_here, ptr %start)
  ret void
}}"""
