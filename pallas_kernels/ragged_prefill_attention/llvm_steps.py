"""What a chunk of the attention does with one run of context tokens, in LLVM IR: fetch it, and take a few rows of queries over it."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.llvm.exponential import splat

LANES = 16
VECTOR = f"<{LANES} x float>"
MASKED = -1e30
_MOST_GROWTH = 8.0  # of a weight, as a logarithm to base 2
_ROUNDER = 1.5 * 2**23
_POWERS = (1.0, 0.6931469440460205, 0.24022120237350464, 0.05550713464617729, 0.009675540961325169, 0.0013276470126584172)


@dataclass(frozen=True)
class Sizes:
    """Of a kernel's parts: it takes `at_once` rows by up to `vectors` vectors of sums at a time, over runs of `run` context tokens."""

    at_once: int
    vectors: int
    run: int
    head_size: int
    group: int
    page_size: int

    def cut(self, vectors: int) -> list[int]:
        """So many vectors as parts that are summed at a time, as equal as they can be."""
        parts = -(-vectors // self.vectors)
        return [vectors * (i + 1) // parts - vectors * i // parts for i in range(parts)]


def steps(sizes: Sizes) -> str:
    """IR of `fetch` and `attend`."""
    most = sizes.run // LANES
    scores = [_scores(sizes, vectors) for vectors in range(1, most + 1)]
    table = f"@scores = internal constant [{most} x ptr] [{', '.join(f'ptr @scores_{i + 1}' for i in range(most))}]"
    parts = [
        _DECLARATIONS,
        _power(),
        _fetch(sizes),
        _transpose(sizes),
        *scores,
        table,
        _mask(sizes),
        _soften(sizes),
        _weigh(sizes),
        _attend(sizes),
    ]
    return "\n".join(parts)


_DECLARATIONS = f"""
declare i64 @llvm.smin.i64(i64, i64)
declare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
define internal {VECTOR} @max16({VECTOR} %a, {VECTOR} %b) alwaysinline {{
  %is_more = fcmp ogt {VECTOR} %a, %b
  %most = select <{LANES} x i1> %is_more, {VECTOR} %a, {VECTOR} %b
  ret {VECTOR} %most
}}"""


def _fetch(sizes: Sizes) -> str:
    """Copies the keys and values of `size` tokens from `start` on, of one KV head; keys to whole vectors of tokens, the rest zeros."""
    copies = []
    for i in range(sizes.head_size // LANES):
        for name in ("k", "v"):
            copies += [
                f" %{name}_from{i} = getelementptr float, ptr %{name}_row, i64 {i * LANES}",
                f" %{name}_to{i} = getelementptr float, ptr %{name}_goes, i64 {i * LANES}",
                f" %{name}{i} = load {VECTOR}, ptr %{name}_from{i}, align 4",
                f" store {VECTOR} %{name}{i}, ptr %{name}_to{i}, align 4",
            ]
    return f"""
define internal void @fetch(ptr %keys, ptr %values, i64 %page_stride, ptr %table, i64 %start, i64 %size, ptr %k, ptr %v) {{
entry:
  %more = add i64 %size, {LANES - 1}
  %groups = lshr i64 %more, 4
  %whole = shl i64 %groups, 4
  br label %token
token:
  %s = phi i64 [0, %entry], [%s_next, %token]
  %position = add i64 %start, %s
  %slot = udiv i64 %position, {sizes.page_size}
  %place = urem i64 %position, {sizes.page_size}
  %page_at = getelementptr i32, ptr %table, i64 %slot
  %page32 = load i32, ptr %page_at
  %page = sext i32 %page32 to i64
  %page_off = mul i64 %page, %page_stride
  %row_off = mul i64 %place, {sizes.head_size}
  %off = add i64 %page_off, %row_off
  %k_row = getelementptr float, ptr %keys, i64 %off
  %v_row = getelementptr float, ptr %values, i64 %off
  %goes_off = mul i64 %s, {sizes.head_size}
  %k_goes = getelementptr float, ptr %k, i64 %goes_off
  %v_goes = getelementptr float, ptr %v, i64 %goes_off
{chr(10).join(copies)}
  %s_next = add i64 %s, 1
  %is_more = icmp ult i64 %s_next, %size
  br i1 %is_more, label %token, label %rest
rest:
  %rest_off = mul i64 %size, {sizes.head_size}
  %rest_at = getelementptr float, ptr %k, i64 %rest_off
  %rest_tokens = sub i64 %whole, %size
  %rest_bytes = mul i64 %rest_tokens, {4 * sizes.head_size}
  call void @llvm.memset.p0.i64(ptr %rest_at, i8 0, i64 %rest_bytes, i1 false)
  ret void
}}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)"""


# Of a pair of vectors: which lanes of both make the first new vector, and which the second.
_PAIRS = [[4 * (lane // 4) + lane % 4 // 2 + LANES * (lane % 2) + second for lane in range(LANES)] for second in (0, 2)]
_HALVES = [[4 * (lane // 4) + lane % 2 + LANES * (lane % 4 // 2) + second for lane in range(LANES)] for second in (0, 2)]
_QUARTERS = [[8 * (lane // 4) + lane % 4 + second for lane in range(LANES)] for second in (0, 4)]


def _transpose(sizes: Sizes) -> str:
    """kt[H, run] = k[groups * 16, H] transposed, 16 by 16 at a time."""
    lines = []
    for i in range(LANES):
        lines += [
            f"  %from{i} = getelementptr float, ptr %k_at, i64 {i * sizes.head_size}",
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
            f"  %to{i} = getelementptr float, ptr %kt_at, i64 {column * sizes.run}",
            f"  store {VECTOR} %r4_{i}, ptr %to{i}, align 4",
        ]
    across = sizes.head_size // LANES
    return f"""
define internal void @transpose(ptr %k, ptr %kt, i64 %size) {{
entry:
  %more = add i64 %size, {LANES - 1}
  %groups = lshr i64 %more, 4
  %squares = mul i64 %groups, {across}
  br label %square
square:
  %i = phi i64 [0, %entry], [%i_next, %square]
  %down = udiv i64 %i, {across}
  %right = urem i64 %i, {across}
  %k_down = mul i64 %down, {LANES * sizes.head_size}
  %k_right = mul i64 %right, {LANES}
  %k_off = add i64 %k_down, %k_right
  %k_at = getelementptr float, ptr %k, i64 %k_off
  %kt_down = mul i64 %right, {LANES * sizes.run}
  %kt_right = mul i64 %down, {LANES}
  %kt_off = add i64 %kt_down, %kt_right
  %kt_at = getelementptr float, ptr %kt, i64 %kt_off
{chr(10).join(lines)}
  %i_next = add i64 %i, 1
  %is_more = icmp ult i64 %i_next, %squares
  br i1 %is_more, label %square, label %end
end:
  ret void
}}"""


def _product(name: str, rows: int, vectors: int, strides: tuple[int, int, int], steps: str, start: list[str]) -> list[str]:
    """Lines of a loop that adds x[rows, steps] w[steps, vectors * 16] to the vectors called `start`, and stores these to y. Strides are x's,
    w's and y's, in numbers; pointers are %x, %w_`name` and %y_`name`."""
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


def _scores(sizes: Sizes, vectors: int) -> str:
    """y[rows, run] = x[rows, H] times so many vectors of the transposed keys."""
    lines, at = [], 0
    for part, width in enumerate(sizes.cut(vectors)):
        lines += [f"  %{name}_{part} = getelementptr float, ptr %{name}, i64 {at * LANES}" for name in ("w", "y")]
        zeros = ["zeroinitializer"] * (sizes.at_once * width)
        strides = (sizes.head_size, sizes.run, sizes.run)
        lines += _product(str(part), sizes.at_once, width, strides, str(sizes.head_size), zeros)
        at += width
    return "\n".join([f"define internal void @scores_{vectors}(ptr %x, ptr %w, ptr %y) {{", *lines, "  ret void", "}"])


def _weigh(sizes: Sizes) -> str:
    """y[rows, H] = y * shrink + x[rows, size] times the values."""
    lines, at = [], 0
    for i in range(sizes.at_once):
        lines += [
            f"  %shrink_at{i} = getelementptr float, ptr %shrinks, i64 {i}",
            f"  %shrink_one{i} = load float, ptr %shrink_at{i}",
            *_splat(f"shrink{i}", f"shrink_one{i}"),
        ]
    for part, width in enumerate(sizes.cut(sizes.head_size // LANES)):
        lines += [f"  %{name}_{part} = getelementptr float, ptr %{name}, i64 {at * LANES}" for name in ("w", "y")]
        start = []
        for i in range(sizes.at_once):
            for j in range(width):
                cell = f"{part}_{i}_{j}"
                lines += [
                    f"  %was_at_{cell} = getelementptr float, ptr %y_{part}, i64 {i * sizes.head_size + j * LANES}",
                    f"  %was_{cell} = load {VECTOR}, ptr %was_at_{cell}, align 4",
                    f"  %shrunk_{cell} = fmul {VECTOR} %was_{cell}, %shrink{i}",
                ]
                start.append(f"%shrunk_{cell}")
        lines += _product(str(part), sizes.at_once, width, (sizes.run, sizes.head_size, sizes.head_size), "%size", start)
        at += width
    return "\n".join(["define internal void @weigh(ptr %x, i64 %size, ptr %w, ptr %y, ptr %shrinks) {", *lines, "  ret void", "}"])


def _mask(sizes: Sizes) -> str:
    """What a row may not see, tokens after its own, is put out of the softmax's reach. `ahead`: how far the tile's first token is past the
    run's; `row`: of the tile, the first of these."""
    lines = []
    for i in range(sizes.at_once):
        lines += [
            f"  %row{i} = add i64 %row, {i}",
            f"  %token{i} = udiv i64 %row{i}, {sizes.group}",
            f"  %own{i} = add i64 %ahead, %token{i}",
            f"  %own32_{i} = trunc i64 %own{i} to i32",
            f"  %own_first{i} = insertelement <{LANES} x i32> poison, i32 %own32_{i}, i64 0",
            f"  %owns{i} = shufflevector <{LANES} x i32> %own_first{i}, <{LANES} x i32> poison, <{LANES} x i32> zeroinitializer",
        ]
        for j in range(sizes.run // LANES):
            tokens = ", ".join(f"i32 {j * LANES + lane}" for lane in range(LANES))
            lines += [
                f"  %at{i}_{j} = getelementptr float, ptr %scores, i64 {i * sizes.run + j * LANES}",
                f"  %score{i}_{j} = load {VECTOR}, ptr %at{i}_{j}, align 4",
                f"  %sees{i}_{j} = icmp sge <{LANES} x i32> %owns{i}, <{tokens}>",
                f"  %masked{i}_{j} = select <{LANES} x i1> %sees{i}_{j}, {VECTOR} %score{i}_{j}, {VECTOR} {splat(MASKED)}",
                f"  store {VECTOR} %masked{i}_{j}, ptr %at{i}_{j}, align 4",
            ]
    return "\n".join(["define internal void @mask(ptr %scores, i64 %row, i64 %ahead) {", *lines, "  ret void", "}"])


def _soften(sizes: Sizes) -> str:
    """Scores, which are logarithms to base 2, become weights. `tops`: what is taken from them first, a lane a row: each row's maximum, but
    raised only when one of the rows has a score beyond it by more than weights may grow; `sums`: of weights, 16 lanes a row; `shrinks`: by
    what is to be multiplied what was summed under the old tops."""
    parts, rows = range(sizes.run // LANES), range(sizes.at_once)
    lines = [
        f"  %top = load {VECTOR}, ptr %tops, align 4",
        f"  %roof = fadd {VECTOR} %top, {splat(_MOST_GROWTH)}",
    ]
    for i in rows:
        for j in parts:
            lines += [
                f"  %at{i}_{j} = getelementptr float, ptr %scores, i64 {i * sizes.run + j * LANES}",
                f"  %score{i}_{j} = load {VECTOR}, ptr %at{i}_{j}, align 4",
            ]
        most = f"%score{i}_0"
        for j in parts[1:]:
            lines.append(f"  %most{i}_{j} = call {VECTOR} @max16({VECTOR} {most}, {VECTOR} %score{i}_{j})")
            most = f"%most{i}_{j}"
        lines += [
            f"  %roof{i} = shufflevector {VECTOR} %roof, {VECTOR} poison, <{LANES} x i32> <{_lane(i)}>",
            f"  %grows{i} = fcmp ogt {VECTOR} {most}, %roof{i}",
            f"  %any{i} = {f'or <{LANES} x i1> %any{i - 1}, %grows{i}' if i else f'or <{LANES} x i1> %grows0, %grows0'}",
        ]
    lines += [
        f"  %bits = bitcast <{LANES} x i1> %any{rows[-1]} to i{LANES}",
        f"  %grows = icmp ne i{LANES} %bits, 0",
        "  br i1 %grows, label %raise, label %weights",
        "raise:",
    ]
    found = "%top"
    for i in rows:
        most = f"%most{i}_{parts[-1]}" if len(parts) > 1 else f"%score{i}_0"
        for apart in (8, 4, 2, 1):
            lanes = ", ".join(f"i32 {(lane + apart) % LANES}" for lane in range(LANES))
            lines += [
                f"  %turned{i}_{apart} = shufflevector {VECTOR} {most}, {VECTOR} poison, <{LANES} x i32> <{lanes}>",
                f"  %fold{i}_{apart} = call {VECTOR} @max16({VECTOR} {most}, {VECTOR} %turned{i}_{apart})",
            ]
            most = f"%fold{i}_{apart}"
        lines += [
            f"  %row_top{i} = extractelement {VECTOR} {most}, i64 0",
            f"  %found{i} = insertelement {VECTOR} {found}, float %row_top{i}, i64 {i}",
        ]
        found = f"%found{i}"
    lines += [
        f"  %raised = call {VECTOR} @max16({VECTOR} {found}, {VECTOR} %top)",
        f"  %less = fsub {VECTOR} %top, %raised",
        f"  %power = call {VECTOR} @power16({VECTOR} %less)",
        f"  store {VECTOR} %raised, ptr %tops, align 4",
        "  br label %weights",
        "weights:",
        f"  %new_top = phi {VECTOR} [%top, %entry], [%raised, %raise]",
        f"  %shrink = phi {VECTOR} [{splat(1.0)}, %entry], [%power, %raise]",
        f"  store {VECTOR} %shrink, ptr %shrinks, align 4",
    ]
    for i in rows:
        lines += [
            f"  %top{i} = shufflevector {VECTOR} %new_top, {VECTOR} poison, <{LANES} x i32> <{_lane(i)}>",
            f"  %shrink{i} = shufflevector {VECTOR} %shrink, {VECTOR} poison, <{LANES} x i32> <{_lane(i)}>",
            f"  %sum_at{i} = getelementptr float, ptr %sums, i64 {i * LANES}",
            f"  %sum{i} = load {VECTOR}, ptr %sum_at{i}, align 4",
            f"  %total{i}_0 = fmul {VECTOR} %sum{i}, %shrink{i}",
        ]
        for j in parts:
            lines += [
                f"  %over{i}_{j} = fsub {VECTOR} %score{i}_{j}, %top{i}",
                f"  %weight{i}_{j} = call {VECTOR} @power16({VECTOR} %over{i}_{j})",
                f"  store {VECTOR} %weight{i}_{j}, ptr %at{i}_{j}, align 4",
                f"  %total{i}_{j + 1} = fadd {VECTOR} %total{i}_{j}, %weight{i}_{j}",
            ]
        lines.append(f"  store {VECTOR} %total{i}_{len(parts)}, ptr %sum_at{i}, align 4")
    return "\n".join(
        ["define internal void @soften(ptr %scores, ptr %tops, ptr %sums, ptr %shrinks) {", "entry:", *lines, "  ret void", "}"]
    )


def _lane(lane: int) -> str:
    return ", ".join([f"i32 {lane}"] * LANES)


def _power() -> str:
    """2 to numbers up to 100, relative error below 3e-7; 0 below -125; NaN of NaN. Numbers are rounded by being added to one so large that
    its last bit is worth 1; those bits are then the exponent."""
    lines = [
        f"  %shifted = fadd {VECTOR} %x, {splat(_ROUNDER)}",
        f"  %whole = fsub {VECTOR} %shifted, {splat(_ROUNDER)}",
        f"  %r = fsub {VECTOR} %x, %whole",
    ]
    last = splat(_POWERS[-1])
    for i, coefficient in enumerate(_POWERS[-2::-1]):
        lines.append(f"  %p{i} = call {VECTOR} @llvm.fma.v16f32({VECTOR} {last}, {VECTOR} %r, {VECTOR} {splat(coefficient)})")
        last = f"%p{i}"
    lines += [
        f"  %bits = bitcast {VECTOR} {last} to <{LANES} x i32>",
        f"  %whole_bits = bitcast {VECTOR} %shifted to <{LANES} x i32>",
        f"  %exponent = shl <{LANES} x i32> %whole_bits, splat (i32 23)",
        f"  %sum = add <{LANES} x i32> %bits, %exponent",
        f"  %is_low = fcmp olt {VECTOR} %x, {splat(-125.0)}",
        f"  %found = select <{LANES} x i1> %is_low, <{LANES} x i32> zeroinitializer, <{LANES} x i32> %sum",
        f"  %result = bitcast <{LANES} x i32> %found to {VECTOR}",
        f"  ret {VECTOR} %result",
    ]
    return "\n".join([f"define internal {VECTOR} @power16({VECTOR} %x) alwaysinline {{", *lines, "}"])


def _attend(sizes: Sizes) -> str:
    """Takes `at_once` rows of the tile, from `row` to `last`, over a run of `size` tokens."""
    return f"""
define internal void @attend(ptr %q, i64 %row, i64 %last, i64 %ahead, i64 %size, ptr %kt, ptr %v, ptr %out, ptr %tops, ptr %sums) {{
entry:
  %scores = alloca [{sizes.at_once * sizes.run} x float], align 64
  %shrinks = alloca [{LANES} x float], align 64
  %last_token = udiv i64 %last, {sizes.group}
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
  %first_token = udiv i64 %row, {sizes.group}
  %first_own = add i64 %ahead, %first_token
  %sees_all = icmp sge i64 %first_own, {sizes.run - 1}
  br i1 %sees_all, label %weigh, label %mask
mask:
  call void @mask(ptr %scores, i64 %row, i64 %ahead)
  br label %weigh
weigh:
  call void @soften(ptr %scores, ptr %tops, ptr %sums, ptr %shrinks)
  call void @weigh(ptr %scores, i64 %seen, ptr %v, ptr %out, ptr %shrinks)
  br label %end
end:
  ret void
}}"""
