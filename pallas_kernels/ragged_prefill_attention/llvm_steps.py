"""LLVM IR for what a chunk of the attention does with one run of context tokens: fetch it, and attend with a few rows
of queries."""

from __future__ import annotations

from pallas_kernels.llvm.page_values import load_values
from pallas_kernels.ragged_prefill_attention.llvm_blocking import LANES, VECTOR, PrefillBlocking
from pallas_kernels.ragged_prefill_attention.llvm_softmax import softmax


def steps(blocking: PrefillBlocking) -> str:
    """IR of `fetch` and `attend`."""
    most = blocking.run // LANES
    scores = [_scores(blocking, vectors) for vectors in range(1, most + 1)]
    table = f"@scores = internal constant [{most} x ptr] [{', '.join(f'ptr @scores_{i + 1}' for i in range(most))}]"
    parts = [_DECLARATIONS, softmax(blocking), _fetch(blocking), _transpose(blocking), *scores, table, _weigh(blocking), _attend(blocking)]
    return "\n".join(parts)


_DECLARATIONS = f"""
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare {VECTOR} @llvm.fmuladd.v16f32({VECTOR}, {VECTOR}, {VECTOR})"""


def _fetch(blocking: PrefillBlocking) -> str:
    """Copies the keys and values of up to 16 tokens from `start` on, of one KV head; keys that are missing are
    zeros."""
    copies = []
    for i in range(blocking.head_size // LANES):
        for name in ("k", "v"):
            copies += [
                f" %{name}_from{i} = getelementptr i8, ptr %{name}_row, i64 {i * LANES * blocking.value_bytes}",
                f" %{name}_to{i} = getelementptr float, ptr %{name}_goes, i64 {i * LANES}",
                *load_values(f"{name}{i}", f"%{name}_from{i}", blocking.value_bytes),
                f" store {VECTOR} %{name}{i}, ptr %{name}_to{i}, align 4",
            ]
    return f"""
define internal void @fetch(ptr %keys, ptr %values, i64 %page_stride, ptr %table, i64 %start, i64 %size, ptr %k, ptr %v) {{
entry:
  br label %token
token:
  %s = phi i64 [0, %entry], [%s_next, %token]
  %position = add i64 %start, %s
  %slot = udiv i64 %position, {blocking.page_size}
  %place = urem i64 %position, {blocking.page_size}
  %page_at = getelementptr i32, ptr %table, i64 %slot
  %page32 = load i32, ptr %page_at
  %page = sext i32 %page32 to i64
  %page_off = mul i64 %page, %page_stride
  %row_off = mul i64 %place, {blocking.head_size}
  %off_values = add i64 %page_off, %row_off
  %off = mul i64 %off_values, {blocking.value_bytes}
  %k_row = getelementptr i8, ptr %keys, i64 %off
  %v_row = getelementptr i8, ptr %values, i64 %off
  %goes_off = mul i64 %s, {blocking.head_size}
  %k_goes = getelementptr float, ptr %k, i64 %goes_off
  %v_goes = getelementptr float, ptr %v, i64 %goes_off
{chr(10).join(copies)}
  %s_next = add i64 %s, 1
  %is_more = icmp ult i64 %s_next, %size
  br i1 %is_more, label %token, label %rest
rest:
  %rest_off = mul i64 %size, {blocking.head_size}
  %rest_at = getelementptr float, ptr %k, i64 %rest_off
  %rest_tokens = sub i64 {LANES}, %size
  %rest_bytes = mul i64 %rest_tokens, {4 * blocking.head_size}
  call void @llvm.memset.p0.i64(ptr %rest_at, i8 0, i64 %rest_bytes, i1 false)
  ret void
}}"""


# Of a pair of vectors: which lanes of both make the first new vector, and which the second.
_PAIRS = [[4 * (lane // 4) + lane % 4 // 2 + LANES * (lane % 2) + second for lane in range(LANES)] for second in (0, 2)]
_HALVES = [[4 * (lane // 4) + lane % 2 + LANES * (lane % 4 // 2) + second for lane in range(LANES)] for second in (0, 2)]
_QUARTERS = [[8 * (lane // 4) + lane % 4 + second for lane in range(LANES)] for second in (0, 4)]


def _transpose(blocking: PrefillBlocking) -> str:
    """16 columns of kt[H, run]: k[16, H] transposed, 16 by 16 at a time."""
    lines = []
    for i in range(LANES):
        lines += [
            f"  %from{i} = getelementptr float, ptr %k_at, i64 {i * blocking.head_size}",
            f"  %r0_{i} = load {VECTOR}, ptr %from{i}, align 4",
        ]
    columns = [list(range(LANES))] * LANES  # of the lanes of each vector
    for stage, (apart, lanes) in enumerate(((1, _PAIRS), (2, _HALVES), (4, _QUARTERS), (8, _QUARTERS))):
        before, columns = columns, [[]] * LANES
        for i in range(LANES):
            if i & apart:
                continue
            for which, mask in zip((i, i + apart), lanes, strict=True):
                indices = ", ".join(f"i32 {lane}" for lane in mask)
                pair = f"{VECTOR} %r{stage}_{i}, {VECTOR} %r{stage}_{i + apart}"
                lines.append(f"  %r{stage + 1}_{which} = shufflevector {pair}, <{LANES} x i32> <{indices}>")
                columns[which] = [(before[i] + before[i + apart])[lane] for lane in mask]
    for i, (column, *_) in enumerate(columns):
        lines += [
            f"  %to{i} = getelementptr float, ptr %kt_at, i64 {column * blocking.run}",
            f"  store {VECTOR} %r4_{i}, ptr %to{i}, align 4",
        ]
    return f"""
define internal void @transpose(ptr %k, ptr %kt) {{
entry:
  br label %square
square:
  %i = phi i64 [0, %entry], [%i_next, %square]
  %k_at = getelementptr float, ptr %k, i64 %i
  %kt_off = mul i64 %i, {blocking.run}
  %kt_at = getelementptr float, ptr %kt, i64 %kt_off
{chr(10).join(lines)}
  %i_next = add i64 %i, {LANES}
  %is_more = icmp ult i64 %i_next, {blocking.head_size}
  br i1 %is_more, label %square, label %end
end:
  ret void
}}"""


def _product(name: str, rows: int, vectors: int, strides: tuple[int, int, int], steps: str, start: list[str]) -> list[str]:
    """Lines of a loop that adds x[rows, steps] w[steps, vectors * 16] to the vectors called `start`, and stores these
    to y. Strides are x's, w's and y's, in numbers; pointers are %x, %w_`name` and %y_`name`."""
    x_stride, w_stride, y_stride = strides
    cells = [(i, j) for i in range(rows) for j in range(vectors)]
    lines = [f"  br label %before_{name}", f"before_{name}:", f"  br label %loop_{name}", f"loop_{name}:"]
    lines.append(f"  %k_{name} = phi i64 [0, %before_{name}], [%next_{name}, %loop_{name}]")
    for (i, j), first in zip(cells, start, strict=True):
        lines.append(f"  %sum_{name}_{i}_{j} = phi {VECTOR} [{first}, %before_{name}], [%new_{name}_{i}_{j}, %loop_{name}]")
    lines += [f"  %w_off_{name} = mul i64 %k_{name}, {w_stride}", f"  %w_at_{name} = getelementptr float, ptr %w_{name}, i64 %w_off_{name}"]
    for j in range(vectors):
        lines += [
            f"  %w_at_{name}_{j} = getelementptr float, ptr %w_at_{name}, i64 {j * LANES}",
            f"  %b_{name}_{j} = load {VECTOR}, ptr %w_at_{name}_{j}, align 4",
        ]
    lines.append(f"  %x_at_{name} = getelementptr float, ptr %x, i64 %k_{name}")
    for i in range(rows):
        lines += [
            f"  %x_at_{name}_{i} = getelementptr float, ptr %x_at_{name}, i64 {i * x_stride}",
            f"  %one_{name}_{i} = load float, ptr %x_at_{name}_{i}",
            *_splat(f"a_{name}_{i}", f"one_{name}_{i}"),
        ]
    for i, j in cells:
        factors = f"{VECTOR} %a_{name}_{i}, {VECTOR} %b_{name}_{j}"
        lines.append(f"  %new_{name}_{i}_{j} = call {VECTOR} @llvm.fmuladd.v16f32({factors}, {VECTOR} %sum_{name}_{i}_{j})")
    lines += [
        f"  %next_{name} = add i64 %k_{name}, 1",
        f"  %is_more_{name} = icmp ult i64 %next_{name}, {steps}",
        f"  br i1 %is_more_{name}, label %loop_{name}, label %end_{name}",
        f"end_{name}:",
    ]
    for i, j in cells:
        lines += [
            f"  %y_at_{name}_{i}_{j} = getelementptr float, ptr %y_{name}, i64 {i * y_stride + j * LANES}",
            f"  store {VECTOR} %new_{name}_{i}_{j}, ptr %y_at_{name}_{i}_{j}, align 4",
        ]
    return lines


def _splat(name: str, scalar: str) -> list[str]:
    return [
        f"  %{name}_first = insertelement {VECTOR} poison, float %{scalar}, i64 0",
        f"  %{name} = shufflevector {VECTOR} %{name}_first, {VECTOR} poison, <{LANES} x i32> zeroinitializer",
    ]


def _scores(blocking: PrefillBlocking, vectors: int) -> str:
    """y[rows, run] = x[rows, H] times `vectors` vectors of the transposed keys."""
    lines, at = [], 0
    for part, width in enumerate(blocking.split_vectors(vectors)):
        lines += [f"  %{name}_{part} = getelementptr float, ptr %{name}, i64 {at * LANES}" for name in ("w", "y")]
        zeros = ["zeroinitializer"] * (blocking.at_once * width)
        strides = (blocking.head_size, blocking.run, blocking.run)
        lines += _product(str(part), blocking.at_once, width, strides, str(blocking.head_size), zeros)
        at += width
    return "\n".join([f"define internal void @scores_{vectors}(ptr %x, ptr %w, ptr %y) {{", *lines, "  ret void", "}"])


def _weigh(blocking: PrefillBlocking) -> str:
    """y[rows, H] = y * rescale + x[rows, size] times the values."""
    lines, at = [], 0
    for i in range(blocking.at_once):
        lines += [
            f"  %rescale_at{i} = getelementptr float, ptr %rescales, i64 {i}",
            f"  %rescale_one{i} = load float, ptr %rescale_at{i}",
            *_splat(f"rescale{i}", f"rescale_one{i}"),
        ]
    for part, width in enumerate(blocking.split_vectors(blocking.head_size // LANES)):
        lines += [f"  %{name}_{part} = getelementptr float, ptr %{name}, i64 {at * LANES}" for name in ("w", "y")]
        start = []
        for i in range(blocking.at_once):
            for j in range(width):
                cell = f"{part}_{i}_{j}"
                lines += [
                    f"  %was_at_{cell} = getelementptr float, ptr %y_{part}, i64 {i * blocking.head_size + j * LANES}",
                    f"  %was_{cell} = load {VECTOR}, ptr %was_at_{cell}, align 4",
                    f"  %rescaled_{cell} = fmul {VECTOR} %was_{cell}, %rescale{i}",
                ]
                start.append(f"%rescaled_{cell}")
        lines += _product(str(part), blocking.at_once, width, (blocking.run, blocking.head_size, blocking.head_size), "%size", start)
        at += width
    return "\n".join(["define internal void @weigh(ptr %x, i64 %size, ptr %w, ptr %y, ptr %rescales) {", *lines, "  ret void", "}"])


def _attend(blocking: PrefillBlocking) -> str:
    """Attends with `at_once` rows of the tile, from `row` to `last`, over a run of `size` tokens."""
    return f"""
define internal void @attend(ptr %q, i64 %row, i64 %last, i64 %ahead, i64 %size, ptr %kt, ptr %v, ptr %out, ptr %tops, ptr %sums) {{
entry:
  %scores = alloca [{blocking.at_once * blocking.run} x float], align 64
  %rescales = alloca [{LANES} x float], align 64
  %last_token = udiv i64 %last, {blocking.group}
  %last_own = add i64 %ahead, %last_token
  %last_sees = add i64 %last_own, 1
  %seen = call i64 @llvm.smin.i64(i64 %last_sees, i64 %size)
  %sees_any = icmp sgt i64 %seen, 0
  br i1 %sees_any, label %score, label %end
score:
  %seen_more = add i64 %seen, {LANES - 1}
  %vectors = lshr i64 %seen_more, 4
  %function_place = sub i64 %vectors, 1
  %function_at = getelementptr ptr, ptr @scores, i64 %function_place
  %function = load ptr, ptr %function_at
  call void %function(ptr %q, ptr %kt, ptr %scores)
  %first_token = udiv i64 %row, {blocking.group}
  %first_own = add i64 %ahead, %first_token
  %sees_all = icmp sge i64 %first_own, {blocking.run - 1}
  br i1 %sees_all, label %weigh, label %mask
mask:
  call void @mask(ptr %scores, i64 %row, i64 %ahead)
  br label %weigh
weigh:
  call void @update_softmax(ptr %scores, ptr %tops, ptr %sums, ptr %rescales)
  call void @weigh(ptr %scores, i64 %seen, ptr %v, ptr %out, ptr %rescales)
  br label %end
end:
  ret void
}}"""
