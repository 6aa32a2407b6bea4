"""The kernel's code: LLVM IR for a product of packed rows with a packed matrix, and the XLA custom call around it.

A tile is up to 8 rows by 3 panels of 16 outputs, whose sums stay in registers while the inputs go by, 4 bytes of them at a time: one
float32, two bfloat16 or four int8. A call's work is cut into chunks (some panels by some rows) that the calling thread and helpers from
XLA's own thread pool take one after another, so a helper that comes late, or never, only leaves more to the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["float32", "bfloat16", "int8"]

_ROWS_AT_ONCE = 128  # of a chunk: their inputs stay in the second-level cache while panels go by
_CHUNK_BYTES = 1 << 18  # of matrix


@dataclass(frozen=True)
class Target:
    """What the generated code may use."""

    is_x86: bool
    avx512: bool
    avx512_bf16: bool
    avx512_vnni: bool
    llvm_version: int

    @property
    def tiles(self) -> dict[int, int]:
        """Rows of a tile -> panels of it at most: as many sums as there are registers for."""
        return {8: 3, 4: 4, 2: 4, 1: 4} if self.avx512 else {4: 1, 2: 1, 1: 1}


def module(kind: Kind, target: Target) -> str:
    """The IR of one kind's handler, `@matmul`, an `XLA_FFI_Handler` of (x, matrix, place) -> (y)."""
    tiles = target.tiles
    functions = [_tile(kind, target, rows, panels) for rows, most in tiles.items() for panels in range(1, most + 1)]
    return "\n".join([_declarations(kind, target), *functions, _block(tiles), _SCHEDULING, _handler(tiles)])


def _declarations(kind: Kind, target: Target) -> str:
    lanes = _vnni_lanes(target)
    found = ["declare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)", "declare ptr @malloc(i64)", "declare void @free(ptr)"]
    if target.is_x86:
        found.append("declare void @llvm.x86.sse2.pause()")
    if kind == "bfloat16" and target.avx512_bf16:
        found.append("declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)")
    if kind == "int8":
        found.append(f"declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, {lanes}, {lanes})")
    pause = "call void @llvm.x86.sse2.pause()" if target.is_x86 else ""
    return "\n".join([*found, f"define internal void @pause() alwaysinline {{\n {pause}\n ret void\n}}"])


def _vnni_lanes(target: Target) -> str:
    return "<64 x i8>" if target.llvm_version >= 22 else "<16 x i32>"


def _tile(kind: Kind, target: Target, rows: int, panels: int) -> str:
    """y[rows, panels * 16] = x[rows, :] times the panels. `steps`: inputs in groups of 4 bytes; `outputs`: of y's rows."""
    sums = "<16 x i32>" if kind == "int8" else "<16 x float>"
    cells = [(i, j) for i in range(rows) for j in range(panels)]
    lines = [
        f"define internal void @tile_{rows}_{panels}(ptr %x, i64 %steps, ptr %w, ptr %y, i64 %outputs) {{",
        "entry:",
        " %row = shl i64 %steps, 2",
        " %panel = shl i64 %steps, 6",
        " %y_row = shl i64 %outputs, 2",
    ]
    for name, stride, count in (("x", "row", rows), ("w", "panel", panels), ("y", "y_row", rows)):
        for i in range(count):
            lines += [f" %{name}_off{i} = mul i64 %{stride}, {i}", f" %{name}{i} = getelementptr i8, ptr %{name}, i64 %{name}_off{i}"]
    lines += [" br label %loop", "loop:", " %k = phi i64 [0, %entry], [%next, %loop]"]
    lines += [f" %sum{i}_{j} = phi {sums} [zeroinitializer, %entry], [%new{i}_{j}, %loop]" for i, j in cells]
    lines += [" %k_w = shl i64 %k, 6", " %k_x = shl i64 %k, 2"]
    for j in range(panels):
        lines += [
            f" %at_w{j} = getelementptr i8, ptr %w{j}, i64 %k_w",
            f" %b{j} = load <16 x i32>, ptr %at_w{j}, align 4",
        ]
    for i in range(rows):
        lines += [
            f" %at_x{i} = getelementptr i8, ptr %x{i}, i64 %k_x",
            f" %one{i} = load i32, ptr %at_x{i}, align 4",
            f" %first{i} = insertelement <16 x i32> poison, i32 %one{i}, i64 0",
            f" %a{i} = shufflevector <16 x i32> %first{i}, <16 x i32> poison, <16 x i32> zeroinitializer",
        ]
    for i, j in cells:
        lines += _multiply_add(kind, target, i, j)
    lines += [" %next = add i64 %k, 1", " %more = icmp ult i64 %next, %steps", " br i1 %more, label %loop, label %end", "end:"]
    for i, j in cells:
        lines += [f" %at_y{i}_{j} = getelementptr i8, ptr %y{i}, i64 {64 * j}", f" store {sums} %new{i}_{j}, ptr %at_y{i}_{j}, align 4"]
    return "\n".join([*lines, " ret void", "}"])


def _multiply_add(kind: Kind, target: Target, i: int, j: int) -> list[str]:
    """%new = %sum + a row's group of inputs times those of a panel's 16 outputs."""
    cell, a, b = f"{i}_{j}", f"%a{i}", f"%b{j}"
    if kind == "float32":
        return [
            f" %af{cell} = bitcast <16 x i32> {a} to <16 x float>",
            f" %bf{cell} = bitcast <16 x i32> {b} to <16 x float>",
            f" %new{cell} = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %af{cell}, <16 x float> %bf{cell}, <16 x float> %sum{cell})",
        ]
    if kind == "int8":  # of the matrix unsigned, of x signed
        lanes = _vnni_lanes(target)
        return [
            f" %ai{cell} = bitcast <16 x i32> {a} to {lanes}",
            f" %bi{cell} = bitcast <16 x i32> {b} to {lanes}",
            f" %new{cell} = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %sum{cell}, {lanes} %bi{cell}, {lanes} %ai{cell})",
        ]
    if target.avx512_bf16:
        return [
            f" %ah{cell} = bitcast <16 x i32> {a} to <32 x bfloat>",
            f" %bh{cell} = bitcast <16 x i32> {b} to <32 x bfloat>",
            f" %new{cell} = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sum{cell}, <32 x bfloat> %ah{cell}, <32 x bfloat> %bh{cell})",
        ]
    lines, last = [], f"%sum{cell}"  # a bfloat16 is the upper half of a float32
    for half, operation in (("lo", "shl <16 x i32> {}, splat (i32 16)"), ("hi", "and <16 x i32> {}, splat (i32 -65536)")):
        for name, value in (("a", a), ("b", b)):
            lines += [
                f" %{name}{half}i{cell} = {operation.format(value)}",
                f" %{name}{half}{cell} = bitcast <16 x i32> %{name}{half}i{cell} to <16 x float>",
            ]
        result = f"%new{cell}" if half == "hi" else f"%half{cell}"
        lines.append(f" {result} = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %a{half}{cell}, <16 x float> %b{half}{cell}, <16 x float> {last})")
        last = result
    return lines


def _block(tiles: dict[int, int]) -> str:
    """y[rows, panels * 16] = x times the panels, tile by tile: all rows while some panels are in the first-level cache."""
    widest = max(tiles.values())
    sizes = sorted(tiles)  # 1, 2, 4, 8
    pointers = ", ".join(
        f"ptr @tile_{rows}_{panels}" if panels <= tiles[rows] else "ptr null" for rows in sizes for panels in range(1, widest + 1)
    )
    pick = ["  %size0 = add i64 0, 1", "  %place0 = add i64 0, 0"]
    for place, rows in enumerate(sizes[1:], 1):
        pick += [
            f"  %fits{place} = icmp uge i64 %rows_left, {rows}",
            f"  %size{place} = select i1 %fits{place}, i64 {rows}, i64 %size{place - 1}",
            f"  %place{place} = select i1 %fits{place}, i64 {place * widest}, i64 %place{place - 1}",
        ]
    last = len(sizes) - 1
    return f"""
@tiles = internal constant [{len(sizes) * widest} x ptr] [{pointers}]
define internal void @block(ptr %x, i64 %rows, i64 %steps, ptr %w, ptr %y, i64 %outputs, i64 %panels) {{
entry:
  %is_tall = icmp uge i64 %rows, {sizes[-1]}
  %width = select i1 %is_tall, i64 {tiles[sizes[-1]]}, i64 {widest}
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
{chr(10).join(pick)}
  %column = add i64 %num, -1
  %index = add i64 %place{last}, %column
  %slot = getelementptr ptr, ptr @tiles, i64 %index
  %function = load ptr, ptr %slot
  %x_off = mul i64 %r, %x_row
  %x_r = getelementptr i8, ptr %x, i64 %x_off
  %y_r_off = mul i64 %r, %y_row
  %y_r = getelementptr i8, ptr %y_p, i64 %y_r_off
  call void %function(ptr %x_r, i64 %steps, ptr %w_p, ptr %y_r, i64 %outputs)
  %r_next = add i64 %r, %size{last}
  %more_rows = icmp ult i64 %r_next, %rows
  br i1 %more_rows, label %tile, label %columns_end
columns_end:
  %p_next = add i64 %p, %num
  %more = icmp ult i64 %p_next, %panels
  br i1 %more, label %columns, label %end
end:
  ret void
}}"""


# A job lives until its last holder lets go of it: a helper may come after the call has returned.
#   0 next chunk, 1 chunks done, 2 holders, 3 x, 4 w, 5 y, 6 rows, 7 steps, 8 panels, 9 panels a chunk, 10 chunks of panels, 11 chunks
_SCHEDULING = f"""
%job = type {{ i64, i64, i64, ptr, ptr, ptr, i64, i64, i64, i64, i64, i64 }}
define internal void @work(ptr %job) {{
entry:
  %done_at = getelementptr %job, ptr %job, i64 0, i32 1
  %x_at = getelementptr %job, ptr %job, i64 0, i32 3
  %w_at = getelementptr %job, ptr %job, i64 0, i32 4
  %y_at = getelementptr %job, ptr %job, i64 0, i32 5
  %rows_at = getelementptr %job, ptr %job, i64 0, i32 6
  %steps_at = getelementptr %job, ptr %job, i64 0, i32 7
  %panels_at = getelementptr %job, ptr %job, i64 0, i32 8
  %size_at = getelementptr %job, ptr %job, i64 0, i32 9
  %across_at = getelementptr %job, ptr %job, i64 0, i32 10
  %chunks_at = getelementptr %job, ptr %job, i64 0, i32 11
  %x = load ptr, ptr %x_at
  %w = load ptr, ptr %w_at
  %y = load ptr, ptr %y_at
  %rows = load i64, ptr %rows_at
  %steps = load i64, ptr %steps_at
  %panels = load i64, ptr %panels_at
  %size = load i64, ptr %size_at
  %across = load i64, ptr %across_at
  %chunks = load i64, ptr %chunks_at
  %outputs = shl i64 %panels, 4
  br label %take
take:
  %c = atomicrmw add ptr %job, i64 1 seq_cst
  %is_left = icmp ult i64 %c, %chunks
  br i1 %is_left, label %chunk, label %end
chunk:
  %down = udiv i64 %c, %across
  %right = urem i64 %c, %across
  %row = mul i64 %down, {_ROWS_AT_ONCE}
  %rows_left = sub i64 %rows, %row
  %rows_here = call i64 @llvm.umin.i64(i64 %rows_left, i64 {_ROWS_AT_ONCE})
  %first = mul i64 %right, %size
  %panels_left = sub i64 %panels, %first
  %panels_here = call i64 @llvm.umin.i64(i64 %panels_left, i64 %size)
  %x_place = mul i64 %row, %steps
  %x_c = getelementptr i32, ptr %x, i64 %x_place
  %w_steps = mul i64 %first, %steps
  %w_off = shl i64 %w_steps, 6
  %w_c = getelementptr i8, ptr %w, i64 %w_off
  %y_row = mul i64 %row, %outputs
  %y_column = shl i64 %first, 4
  %y_place = add i64 %y_row, %y_column
  %y_c = getelementptr i32, ptr %y, i64 %y_place
  call void @block(ptr %x_c, i64 %rows_here, i64 %steps, ptr %w_c, ptr %y_c, i64 %outputs, i64 %panels_here)
  %was = atomicrmw add ptr %done_at, i64 1 release
  br label %take
end:
  ret void
}}
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)

define internal void @let_go(ptr %job) {{
  %holders_at = getelementptr %job, ptr %job, i64 0, i32 2
  %before = atomicrmw sub ptr %holders_at, i64 1 acq_rel
  %is_last = icmp eq i64 %before, 1
  br i1 %is_last, label %last, label %end
last:
  call void @free(ptr %job)
  br label %end
end:
  ret void
}}

define internal void @help(ptr %job) {{
  call void @work(ptr %job)
  call void @let_go(ptr %job)
  ret void
}}
"""


def _handler(tiles: dict[int, int]) -> str:
    """`XLA_FFI_Error* matmul(XLA_FFI_CallFrame*)`. Offsets are those of xla/ffi/api/c_api.h, whose structures only ever grow at their ends.

    Arguments: x[rows, inputs], the packed matrix [..., panels, steps, 16, group], of which `place` (i32) says which of the leading ones;
    y[rows, outputs]."""
    step = tiles[max(tiles)]
    return f"""
define ptr @matmul(ptr %frame) {{
entry:
  %extension_at = getelementptr i8, ptr %frame, i64 8
  %extension = load ptr, ptr %extension_at
  %has_extension = icmp ne ptr %extension, null
  br i1 %has_extension, label %describe, label %call
describe:                                     ; XLA_FFI_Metadata_Extension, the only one there is: which API this is written for
  %metadata_at = getelementptr i8, ptr %extension, i64 24
  %metadata = load ptr, ptr %metadata_at
  %major_at = getelementptr i8, ptr %metadata, i64 24
  store i32 0, ptr %major_at
  %minor_at = getelementptr i8, ptr %metadata, i64 28
  store i32 3, ptr %minor_at
  %traits_at = getelementptr i8, ptr %metadata, i64 32
  store i32 0, ptr %traits_at
  ret ptr null
call:
  %api_at = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api_at
  %context_at = getelementptr i8, ptr %frame, i64 24
  %context = load ptr, ptr %context_at
  %arguments_at = getelementptr i8, ptr %frame, i64 72
  %arguments = load ptr, ptr %arguments_at
  %results_at = getelementptr i8, ptr %frame, i64 112
  %results = load ptr, ptr %results_at
  %x_buffer = load ptr, ptr %arguments
  %w_buffer_at = getelementptr ptr, ptr %arguments, i64 1
  %w_buffer = load ptr, ptr %w_buffer_at
  %place_buffer_at = getelementptr ptr, ptr %arguments, i64 2
  %place_buffer = load ptr, ptr %place_buffer_at
  %y_buffer = load ptr, ptr %results
  %x_data_at = getelementptr i8, ptr %x_buffer, i64 24
  %x = load ptr, ptr %x_data_at
  %w_data_at = getelementptr i8, ptr %w_buffer, i64 24
  %matrices = load ptr, ptr %w_data_at
  %place_data_at = getelementptr i8, ptr %place_buffer, i64 24
  %place_data = load ptr, ptr %place_data_at
  %place32 = load i32, ptr %place_data
  %place = zext i32 %place32 to i64
  %y_data_at = getelementptr i8, ptr %y_buffer, i64 24
  %y = load ptr, ptr %y_data_at
  %x_dims_at = getelementptr i8, ptr %x_buffer, i64 40
  %x_dims = load ptr, ptr %x_dims_at
  %rows = load i64, ptr %x_dims
  %w_dims_at = getelementptr i8, ptr %w_buffer, i64 40
  %w_dims = load ptr, ptr %w_dims_at
  %panels_at = getelementptr i64, ptr %w_dims, i64 1
  %panels = load i64, ptr %panels_at
  %steps_at = getelementptr i64, ptr %w_dims, i64 2
  %steps = load i64, ptr %steps_at
  %panel = shl i64 %steps, 6
  %matrix = mul i64 %panels, %panel
  %w_off = mul i64 %place, %matrix
  %w = getelementptr i8, ptr %matrices, i64 %w_off

  %threads_at = alloca i64
  store i64 1, ptr %threads_at
  %question = alloca [4 x i64]                ; XLA_FFI_ThreadPool_NumThreads_Args
  store i64 32, ptr %question
  %question_extension = getelementptr i64, ptr %question, i64 1
  store i64 0, ptr %question_extension
  %question_context = getelementptr i64, ptr %question, i64 2
  store ptr %context, ptr %question_context
  %question_out = getelementptr i64, ptr %question, i64 3
  store ptr %threads_at, ptr %question_out
  %count_at = getelementptr i8, ptr %api, i64 144
  %count = load ptr, ptr %count_at
  %no_pool = call ptr %count(ptr %question)
  call void @drop(ptr %api, ptr %no_pool)
  %threads = load i64, ptr %threads_at

  ; A chunk of panels: no more than its bytes, and at least two for each thread; whole tiles.
  %by_bytes = udiv i64 {_CHUNK_BYTES}, %panel
  %shares = shl i64 %threads, 1
  %rounded = add i64 %panels, %shares
  %rounded_less = sub i64 %rounded, 1
  %by_threads = udiv i64 %rounded_less, %shares
  %wanted = call i64 @llvm.umin.i64(i64 %by_bytes, i64 %by_threads)
  %is_tall = icmp uge i64 %rows, {max(tiles)}
  %width = select i1 %is_tall, i64 {step}, i64 {max(tiles.values())}
  %least = call i64 @llvm.umax.i64(i64 %wanted, i64 %width)
  %surplus = urem i64 %least, %width
  %size = sub i64 %least, %surplus
  %across_more = add i64 %panels, %size
  %across_less = sub i64 %across_more, 1
  %across = udiv i64 %across_less, %size
  %down_more = add i64 %rows, {_ROWS_AT_ONCE - 1}
  %down = udiv i64 %down_more, {_ROWS_AT_ONCE}
  %chunks = mul i64 %across, %down

  %others = sub i64 %threads, 1
  %others_chunks = sub i64 %chunks, 1
  %helpers = call i64 @llvm.umin.i64(i64 %others, i64 %others_chunks)
  %holders = add i64 %helpers, 1
  %job = call ptr @malloc(i64 96)
  %no_chunk = insertvalue %job zeroinitializer, i64 %holders, 2
  %with_x = insertvalue %job %no_chunk, ptr %x, 3
  %with_w = insertvalue %job %with_x, ptr %w, 4
  %with_y = insertvalue %job %with_w, ptr %y, 5
  %with_rows = insertvalue %job %with_y, i64 %rows, 6
  %with_steps = insertvalue %job %with_rows, i64 %steps, 7
  %with_panels = insertvalue %job %with_steps, i64 %panels, 8
  %with_size = insertvalue %job %with_panels, i64 %size, 9
  %with_across = insertvalue %job %with_size, i64 %across, 10
  %whole = insertvalue %job %with_across, i64 %chunks, 11
  store %job %whole, ptr %job

  %order = alloca [5 x i64]                   ; XLA_FFI_ThreadPool_Schedule_Args
  store i64 40, ptr %order
  %order_extension = getelementptr i64, ptr %order, i64 1
  store i64 0, ptr %order_extension
  %order_context = getelementptr i64, ptr %order, i64 2
  store ptr %context, ptr %order_context
  %order_task = getelementptr i64, ptr %order, i64 3
  store ptr @help, ptr %order_task
  %order_data = getelementptr i64, ptr %order, i64 4
  store ptr %job, ptr %order_data
  %schedule_at = getelementptr i8, ptr %api, i64 136
  %schedule = load ptr, ptr %schedule_at
  br label %hire
hire:
  %hired = phi i64 [0, %call], [%hired_next, %hired_one]
  %enough = icmp uge i64 %hired, %helpers
  br i1 %enough, label %begin, label %hire_one
hire_one:
  %refused = call ptr %schedule(ptr %order)
  %was_refused = icmp ne ptr %refused, null
  br i1 %was_refused, label %go_without, label %hired_one
go_without:
  call void @drop(ptr %api, ptr %refused)
  call void @let_go(ptr %job)
  br label %hired_one
hired_one:
  %hired_next = add i64 %hired, 1
  br label %hire

begin:
  call void @work(ptr %job)
  %done_at = getelementptr %job, ptr %job, i64 0, i32 1
  br label %wait
wait:                                         ; only for chunks that a helper is at: what no one took, this thread has done itself
  %done = load atomic i64, ptr %done_at acquire, align 8
  %is_done = icmp eq i64 %done, %chunks
  br i1 %is_done, label %finish, label %wait_on
wait_on:
  call void @pause()
  br label %wait
finish:
  call void @let_go(ptr %job)
  ret ptr null
}}

define internal void @drop(ptr %api, ptr %error) {{
  %is_none = icmp eq ptr %error, null
  br i1 %is_none, label %end, label %destroy
destroy:
  %order = alloca [3 x i64]                   ; XLA_FFI_Error_Destroy_Args
  store i64 24, ptr %order
  %extension = getelementptr i64, ptr %order, i64 1
  store i64 0, ptr %extension
  %what = getelementptr i64, ptr %order, i64 2
  store ptr %error, ptr %what
  %function_at = getelementptr i8, ptr %api, i64 64
  %function = load ptr, ptr %function_at
  call void %function(ptr %order)
  br label %end
end:
  ret void
}}
"""
