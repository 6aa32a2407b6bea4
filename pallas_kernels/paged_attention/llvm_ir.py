"""The kernel's code: LLVM IR for one query token a row over its pages, read where they lie.

A row's context is cut into parts, and a part into runs. A chunk is one part for one KV head, all of whose query heads go together, so that
each key and value is loaded once. A run leaves a record: for each query head its weighted sum of values, and 16 numbers of which the first
two are the scores' maximum and the weights' sum. Records of runs, then of parts, are merged in the order of the context (an online softmax,
arXiv:1805.02867). How a row is cut depends on its own length alone, so its result is the same in any batch and on any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.llvm.custom_call import handler, load_data, load_dim, load_number, store_number
from pallas_kernels.llvm.exponential import exponential, splat
from pallas_kernels.llvm.machine import Target

LANES = 16  # of a vector, and tokens whose scores are found at once
PART_TOKENS = 128  # of a part, or a multiple of it in contexts of more than MOST_PARTS such
MOST_PARTS = 32
_RUN_BYTES = 1 << 16  # of keys, and as much of values: they stay in the second-level cache
_TOKENS_AHEAD = 32  # of the one whose score is found, keys are asked for; a multiple of 16
_LOWEST = -1e30
_LOWEST_SCORE = splat(_LOWEST).removeprefix("splat (float ").removesuffix(")")


@dataclass(frozen=True)
class Shape:
    """What is known when a program is traced."""

    num_kv_heads: int
    group: int  # query heads of a KV head
    head_size: int
    page_size: int

    @property
    def vectors(self) -> int:
        """Of a head."""
        return self.head_size // LANES

    @property
    def record_size(self) -> int:
        """Numbers of one query head's record."""
        return self.head_size + LANES

    @property
    def run_tokens(self) -> int:
        """A power of two that divides PART_TOKENS."""
        tokens = PART_TOKENS
        while tokens > LANES and tokens * self.num_kv_heads * self.head_size * 4 > _RUN_BYTES:
            tokens //= 2
        return tokens


def most_parts(num_tokens: int) -> int:
    """Parts of a context of up to so many tokens."""
    return max(1, min(MOST_PARTS, -(-num_tokens // PART_TOKENS)))


def scratch_size(shape: Shape, num_tokens: int) -> int:
    """float32 numbers for each row and KV head: a record a part, and a line that holds the count of parts that are done."""
    return most_parts(num_tokens) * shape.group * shape.record_size + LANES


def module(shape: Shape, target: Target) -> str:
    """The IR of the custom call of (q, already scaled, kv_pages, layer, page_table, kv_len) -> (out, scratch)."""
    at_once = _heads_at_once(shape, target)
    parts = [(first, min(at_once, shape.group - first)) for first in range(0, shape.group, at_once)]
    sizes = {count for _, count in parts}
    functions = [*(_score(shape, count, fetches=first == 0) for first, count in {(min(first, 1), count) for first, count in parts})]
    functions += [_add(shape, count) for count in sizes]
    kernel = "\n".join(
        [_DECLARATIONS, exponential(), *functions, _weigh(shape), _part(shape, parts), _merge(shape), _plan(shape), _chunk(shape)]
    )
    return handler(target, 5, 2, kernel)


def _heads_at_once(shape: Shape, target: Target) -> int:
    """Query heads whose sums of values fit into registers."""
    return max(1, min(shape.group, 4, (16 if target.avx512 else 8) // shape.vectors))


_DECLARATIONS = """
declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)
declare float @llvm.vector.reduce.fadd.v16f32(float, <16 x float>)
declare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""


def _broadcast(name: str, value: str, kind: str = "float") -> list[str]:
    return [
        f" %{name}_one = insertelement <16 x {kind}> poison, {kind} {value}, i64 0",
        f" %{name} = shufflevector <16 x {kind}> %{name}_one, <16 x {kind}> poison, <16 x i32> zeroinitializer",
    ]


def _score(shape: Shape, count: int, *, fetches: bool) -> str:
    """Scores of 16 tokens for some query heads of one KV head, and their maxima so far lane by lane. `offsets` are those of the tokens' keys
    and, from `values`, values, in bytes; of these only the first `valid` are in the context."""
    heads = range(count)
    lines = [
        f"define internal void @{_name('score', count, fetches)}(ptr %q, ptr %keys, ptr %values, ptr %offsets, i64 %valid, ptr %scores, ptr %tops) {{",
        "entry:",
        " %valid32 = trunc i64 %valid to i32",
        *_broadcast("limit", "%valid32", "i32"),
        f" %is_valid = icmp ult <16 x i32> <{', '.join(f'i32 {i}' for i in range(LANES))}>, %limit",
    ]
    for j in heads:
        for v in range(shape.vectors):
            lines += [
                f" %q_at{j}_{v} = getelementptr float, ptr %q, i64 {j * shape.head_size + v * LANES}",
                f" %q{j}_{v} = load <16 x float>, ptr %q_at{j}_{v}, align 4",
            ]
    lines += _dots(shape, count, fetches=fetches)
    for j in heads:
        lines += [
            f" %score{j} = select <16 x i1> %is_valid, <16 x float> %dots{j}, <16 x float> splat (float 0xFFF0000000000000)",
            f" %score_at{j} = getelementptr float, ptr %scores, i64 {j * shape.run_tokens}",
            f" store <16 x float> %score{j}, ptr %score_at{j}, align 64",
            f" %top_at{j} = getelementptr float, ptr %tops, i64 {j * LANES}",
            f" %top{j} = load <16 x float>, ptr %top_at{j}, align 64",
            f" %is_higher{j} = fcmp ogt <16 x float> %score{j}, %top{j}",  # false for NaN, which comes back in the weights
            f" %new_top{j} = select <16 x i1> %is_higher{j}, <16 x float> %score{j}, <16 x float> %top{j}",
            f" store <16 x float> %new_top{j}, ptr %top_at{j}, align 64",
        ]
    return "\n".join([*lines, " ret void", "}"])


def _add(shape: Shape, count: int) -> str:
    """Values of up to 16 tokens, weighted, into the records of some query heads of one KV head."""
    cells = [(j, v) for j in range(count) for v in range(shape.vectors)]
    lines = [
        f"define internal void @{_name('add', count)}(ptr %values, ptr %offsets, i64 %tokens, ptr %weights, ptr %records) {{",
        "entry:",
    ]
    for j, v in cells:
        lines += [
            f" %at{j}_{v} = getelementptr float, ptr %records, i64 {j * shape.record_size + v * LANES}",
            f" %before{j}_{v} = load <16 x float>, ptr %at{j}_{v}, align 4",
        ]
    lines += [" br label %token", "token:", " %t = phi i64 [0, %entry], [%t_next, %token]"]
    lines += [f" %sum{j}_{v} = phi <16 x float> [%before{j}_{v}, %entry], [%new{j}_{v}, %token]" for j, v in cells]
    lines += [
        " %offset_at = getelementptr i64, ptr %offsets, i64 %t",
        " %offset = load i64, ptr %offset_at",
        " %value = getelementptr i8, ptr %values, i64 %offset",
    ]
    for v in range(shape.vectors):
        lines += [
            f" %value_at{v} = getelementptr i8, ptr %value, i64 {v * 64}",
            f" %value{v} = load <16 x float>, ptr %value_at{v}, align 4",
        ]
    for j in range(count):
        lines += [
            f" %place{j} = add i64 %t, {j * shape.run_tokens}",
            f" %weight_at{j} = getelementptr float, ptr %weights, i64 %place{j}",
            f" %weight{j} = load float, ptr %weight_at{j}, align 4",
            *_broadcast(f"weights{j}", f"%weight{j}"),
        ]
    lines += [_fma(f"%new{j}_{v}", f"%weights{j}", f"%value{v}", f"%sum{j}_{v}") for j, v in cells]
    lines += [" %t_next = add i64 %t, 1", " %more = icmp ult i64 %t_next, %tokens", " br i1 %more, label %token, label %end", "end:"]
    lines += [f" store <16 x float> %new{j}_{v}, ptr %at{j}_{v}, align 4" for j, v in cells]
    return "\n".join([*lines, " ret void", "}"])


def _weigh(shape: Shape) -> str:
    """One query head's scores of a run into weights, below the maximum so far; what its record holds is brought to that."""
    return f"""
define internal void @weigh(ptr %scores, i64 %tokens, ptr %tops, ptr %record) {{
entry:
  %top = load <16 x float>, ptr %tops, align 64
  %here = call nnan float @llvm.vector.reduce.fmax.v16f32(<16 x float> %top)
  %max_at = getelementptr float, ptr %record, i64 {shape.head_size}
  %sum_at = getelementptr float, ptr %record, i64 {shape.head_size + 1}
  %before = load float, ptr %max_at
  %is_higher = fcmp ogt float %here, %before
  %max = select i1 %is_higher, float %here, float %before
{chr(10).join(_broadcast("maxes", "%max") + _broadcast("befores", "%before"))}
  br label %tile
tile:
  %t = phi i64 [0, %entry], [%t_next, %tile]
  %sums = phi <16 x float> [zeroinitializer, %entry], [%new_sums, %tile]
  %at = getelementptr float, ptr %scores, i64 %t
  %score = load <16 x float>, ptr %at, align 64
  %below = fsub <16 x float> %score, %maxes
  %weights = call <16 x float> @exp16(<16 x float> %below)
  store <16 x float> %weights, ptr %at, align 64
  %new_sums = fadd <16 x float> %sums, %weights
  %t_next = add i64 %t, {LANES}
  %more = icmp ult i64 %t_next, %tokens
  br i1 %more, label %tile, label %tiles_end
tiles_end:
  %sum = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, <16 x float> %new_sums)
  %fall = fsub <16 x float> %befores, %maxes
  %shares = call <16 x float> @exp16(<16 x float> %fall)
  %share = extractelement <16 x float> %shares, i64 0
  %sum_before = load float, ptr %sum_at
  %sum_kept = fmul float %sum_before, %share
  %new_sum = fadd float %sum_kept, %sum
  store float %max, ptr %max_at
  store float %new_sum, ptr %sum_at
  br label %scale
scale:
  %i = phi i64 [0, %tiles_end], [%i_next, %scale]
  %out_at = getelementptr float, ptr %record, i64 %i
  %out = load <16 x float>, ptr %out_at, align 4
  %scaled = fmul <16 x float> %out, %shares
  store <16 x float> %scaled, ptr %out_at, align 4
  %i_next = add i64 %i, {LANES}
  %i_more = icmp ult i64 %i_next, {shape.head_size}
  br i1 %i_more, label %scale, label %end
end:
  ret void
}}"""


def _name(function: str, count: int, fetches: bool = False) -> str:
    return f"{function}_{count}{'_fetching' if fetches else ''}"


def _fetch(shape: Shape, base: str, offset: str) -> list[str]:
    """Ask for what lies at an offset from %base, a token's key or value, some thousand instructions before it is needed."""
    lines = [f" %{base}_{offset} = getelementptr i8, ptr %{base}, i64 %{offset}"]
    for v in range(shape.vectors):
        lines += [
            f" %{base}_{offset}_{v} = getelementptr i8, ptr %{base}_{offset}, i64 {v * 64}",
            f" call void @llvm.prefetch.p0(ptr %{base}_{offset}_{v}, i32 0, i32 3, i32 1)",
        ]
    return lines


def _fma(result: str, a: str, b: str, c: str) -> str:
    return f" {result} = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> {a}, <16 x float> {b}, <16 x float> {c})"


# How two vectors of sums become one with half as many partial sums for each token: what these pick of both is added. After four times a lane
# is a token, in order. The first two stay within 128 bits.
_HALVES = (
    [(q + i + s) for q in (0, 4, 8, 12) for i in (0, 1) for s in (0, 16)],
    [(q + i + s) for q in (0, 4, 8, 12) for s in (0, 16) for i in (0, 1)],
    [(b + s + i) for s in (0, 16) for b in (0, 8) for i in range(4)],
    [(b + s + i) for s in (0, 16) for b in (0, 8) for i in range(4)],
)
_OTHER_HALF = (2, 2, 4, 4)  # further on


def _dots(shape: Shape, count: int, *, fetches: bool) -> list[str]:
    """%dots: 16 tokens' keys times each query. Sums are folded as soon as two can be, so that few wait in registers."""
    lines: list[str] = []
    waiting: list[list[tuple[int, str]]] = [[] for _ in range(count)]  # (how often it was folded, name), by head
    for i in range(LANES):
        lines += [
            f" %k_off_at{i} = getelementptr i64, ptr %offsets, i64 {i}",
            f" %k_off{i} = load i64, ptr %k_off_at{i}",
            f" %k_at{i} = getelementptr i8, ptr %keys, i64 %k_off{i}",
        ]
        if fetches:
            lines += [
                f" %ahead_off_at{i} = getelementptr i64, ptr %offsets, i64 {i + _TOKENS_AHEAD}",
                f" %ahead_off{i} = load i64, ptr %ahead_off_at{i}",
                *_fetch(shape, "keys", f"ahead_off{i}"),
                *_fetch(shape, "values", f"k_off{i}"),
            ]
        for v in range(shape.vectors):
            lines += [
                f" %k_at{i}_{v} = getelementptr i8, ptr %k_at{i}, i64 {v * 64}",
                f" %k{i}_{v} = load <16 x float>, ptr %k_at{i}_{v}, align 4",
            ]
            for j in range(count):
                name, product = f"%dot{j}_{i}_{v}", (f"<16 x float> %q{j}_{v}, %k{i}_{v}")
                lines.append(_fma(name, f"%q{j}_{v}", f"%k{i}_{v}", f"%dot{j}_{i}_{v - 1}") if v else f" {name} = fmul {product}")
        for j in range(count):
            last = (0, f"dot{j}_{i}_{shape.vectors - 1}")
            while waiting[j] and waiting[j][-1][0] == last[0]:
                level, first = waiting[j].pop()
                name = f"dots{j}" if level == 3 else f"folded{j}_{level}_{i}"
                for part, shift in (("low", 0), ("high", _OTHER_HALF[level])):
                    lanes = ", ".join(f"i32 {lane + shift}" for lane in _HALVES[level])
                    lines.append(f" %{name}_{part} = shufflevector <16 x float> %{first}, <16 x float> %{last[1]}, <16 x i32> <{lanes}>")
                lines.append(f" %{name} = fadd <16 x float> %{name}_low, %{name}_high")
                last = (level + 1, name)
            waiting[j].append(last)
    return lines


def _part(shape: Shape, parts: list[tuple[int, int]]) -> str:
    """A part for some KV heads: its runs, one after another, each in the order in which it lies in memory: tile by tile, in them head by head.
    Records of neighbouring KV heads are `stride` numbers apart."""
    score, add = [], []
    for first, count in parts:
        score.append(f"""
  %q_{first} = getelementptr float, ptr %q_h, i64 {first * shape.head_size}
  %scores_{first} = getelementptr float, ptr %scores_h, i64 {first * shape.run_tokens}
  %tops_{first} = getelementptr float, ptr %tops_h, i64 {first * LANES}
  call void @{_name("score", count, first == 0)}(ptr %q_{first}, ptr %keys_h, ptr %values_h, ptr %offsets_s, i64 %valid, ptr %scores_{first}, ptr %tops_{first})""")
        add.append(f"""
  %weights_{first} = getelementptr float, ptr %weights_g, i64 {first * shape.run_tokens}
  %record_{first} = getelementptr float, ptr %record_g, i64 {first * shape.record_size}
  call void @{_name("add", count)}(ptr %values_g, ptr %offsets_a, i64 %tile_tokens, ptr %weights_{first}, ptr %record_{first})""")
    num_heads, head_bytes = shape.num_kv_heads * shape.group, 4 * shape.page_size * shape.head_size
    return f"""
define internal void @part(ptr %q, ptr %keys, i64 %half, ptr %table, i64 %heads, i64 %first, i64 %tokens, ptr %records, i64 %stride) {{
entry:
  %offsets = alloca [{shape.run_tokens + _TOKENS_AHEAD} x i64], align 64
  %scores = alloca [{num_heads * shape.run_tokens} x float], align 64
  %tops = alloca [{num_heads * LANES} x float], align 64
  %values = getelementptr i8, ptr %keys, i64 %half
  %end = add i64 %first, %tokens
  %tops_size = mul i64 %heads, {shape.group * LANES}
  br label %empty
empty:
  %e = phi i64 [0, %entry], [%e_next, %empty_end]
  %e_i = mul i64 %e, %stride
  %e_record = getelementptr float, ptr %records, i64 %e_i
  br label %empty_one
empty_one:
  %e_j = phi i64 [0, %empty], [%e_j_next, %empty_one_end]
  %e_j_i = mul i64 %e_j, {shape.record_size}
  %e_j_record = getelementptr float, ptr %e_record, i64 %e_j_i
  br label %empty_vector
empty_vector:
  %e_v = phi i64 [0, %empty_one], [%e_v_next, %empty_vector]
  %e_at = getelementptr float, ptr %e_j_record, i64 %e_v
  store <16 x float> zeroinitializer, ptr %e_at, align 4
  %e_v_next = add i64 %e_v, {LANES}
  %e_v_more = icmp ult i64 %e_v_next, {shape.record_size}
  br i1 %e_v_more, label %empty_vector, label %empty_one_end
empty_one_end:
  %e_max_at = getelementptr float, ptr %e_j_record, i64 {shape.head_size}
  store float {_LOWEST_SCORE}, ptr %e_max_at
  %e_j_next = add i64 %e_j, 1
  %e_j_more = icmp ult i64 %e_j_next, {shape.group}
  br i1 %e_j_more, label %empty_one, label %empty_end
empty_end:
  %e_next = add i64 %e, 1
  %e_more = icmp ult i64 %e_next, %heads
  br i1 %e_more, label %empty, label %run

run:
  %at = phi i64 [%first, %empty_end], [%at_next, %added]
  %left = sub i64 %end, %at
  %here = call i64 @llvm.umin.i64(i64 %left, i64 {shape.run_tokens})
  %found_more = add i64 %here, {LANES - 1 + _TOKENS_AHEAD}
  %found = and i64 %found_more, -{LANES}
  %last = sub i64 %left, 1
  br label %find
find:                                         ; a tile's tokens past the context are its last one again
  %i = phi i64 [0, %run], [%i_next, %find]
  %valid_i = call i64 @llvm.umin.i64(i64 %i, i64 %last)
  %t = add i64 %at, %valid_i
  %number = udiv i64 %t, {shape.page_size}
  %before = mul i64 %number, {shape.page_size}
  %place = sub i64 %t, %before
  %page_at = getelementptr i32, ptr %table, i64 %number
  %page32 = load i32, ptr %page_at
  %page = zext i32 %page32 to i64
  %page_start = mul i64 %page, {shape.num_kv_heads * head_bytes}
  %in_page = mul i64 %place, {4 * shape.head_size}
  %offset = add i64 %page_start, %in_page
  %offset_at = getelementptr i64, ptr %offsets, i64 %i
  store i64 %offset, ptr %offset_at
  %i_next = add i64 %i, 1
  %more = icmp ult i64 %i_next, %found
  br i1 %more, label %find, label %lower
lower:
  %low_i = phi i64 [0, %find], [%low_next, %lower]
  %low_at = getelementptr float, ptr %tops, i64 %low_i
  store <16 x float> {splat(_LOWEST)}, ptr %low_at, align 64
  %low_next = add i64 %low_i, {LANES}
  %low_more = icmp ult i64 %low_next, %tops_size
  br i1 %low_more, label %lower, label %score_tile

score_tile:
  %s = phi i64 [0, %lower], [%s_next, %score_end]
  %valid = sub i64 %here, %s
  %offsets_s = getelementptr i64, ptr %offsets, i64 %s
  %scores_s = getelementptr float, ptr %scores, i64 %s
  br label %score
score:
  %h = phi i64 [0, %score_tile], [%h_next, %score]
  %q_i = mul i64 %h, {shape.group * shape.head_size}
  %q_h = getelementptr float, ptr %q, i64 %q_i
  %h_off = mul i64 %h, {head_bytes}
  %keys_h = getelementptr i8, ptr %keys, i64 %h_off
  %values_h = getelementptr i8, ptr %values, i64 %h_off
  %scores_i = mul i64 %h, {shape.group * shape.run_tokens}
  %scores_h = getelementptr float, ptr %scores_s, i64 %scores_i
  %tops_i = mul i64 %h, {shape.group * LANES}
  %tops_h = getelementptr float, ptr %tops, i64 %tops_i{"".join(score)}
  %h_next = add i64 %h, 1
  %h_more = icmp ult i64 %h_next, %heads
  br i1 %h_more, label %score, label %score_end
score_end:
  %s_next = add i64 %s, {LANES}
  %s_more = icmp ult i64 %s_next, %here
  br i1 %s_more, label %score_tile, label %weigh

weigh:
  %w = phi i64 [0, %score_end], [%w_next, %weigh_end]
  %w_i = mul i64 %w, %stride
  %w_record = getelementptr float, ptr %records, i64 %w_i
  %w_n = mul i64 %w, {shape.group}
  br label %weigh_one
weigh_one:
  %w_j = phi i64 [0, %weigh], [%w_j_next, %weigh_one]
  %w_j_i = mul i64 %w_j, {shape.record_size}
  %w_j_record = getelementptr float, ptr %w_record, i64 %w_j_i
  %w_head = add i64 %w_n, %w_j
  %w_scores_i = mul i64 %w_head, {shape.run_tokens}
  %w_scores = getelementptr float, ptr %scores, i64 %w_scores_i
  %w_tops_i = mul i64 %w_head, {LANES}
  %w_tops = getelementptr float, ptr %tops, i64 %w_tops_i
  call void @weigh(ptr %w_scores, i64 %here, ptr %w_tops, ptr %w_j_record)
  %w_j_next = add i64 %w_j, 1
  %w_j_more = icmp ult i64 %w_j_next, {shape.group}
  br i1 %w_j_more, label %weigh_one, label %weigh_end
weigh_end:
  %w_next = add i64 %w, 1
  %w_more = icmp ult i64 %w_next, %heads
  br i1 %w_more, label %weigh, label %add_tile

add_tile:
  %a = phi i64 [0, %weigh_end], [%a_next, %add_end]
  %a_left = sub i64 %here, %a
  %tile_tokens = call i64 @llvm.umin.i64(i64 %a_left, i64 {LANES})
  %offsets_a = getelementptr i64, ptr %offsets, i64 %a
  %weights_a = getelementptr float, ptr %scores, i64 %a
  br label %add
add:
  %g = phi i64 [0, %add_tile], [%g_next, %add]
  %g_off = mul i64 %g, {head_bytes}
  %values_g = getelementptr i8, ptr %values, i64 %g_off
  %weights_i = mul i64 %g, {shape.group * shape.run_tokens}
  %weights_g = getelementptr float, ptr %weights_a, i64 %weights_i
  %record_i = mul i64 %g, %stride
  %record_g = getelementptr float, ptr %records, i64 %record_i{"".join(add)}
  %g_next = add i64 %g, 1
  %g_more = icmp ult i64 %g_next, %heads
  br i1 %g_more, label %add, label %add_end
add_end:
  %a_next = add i64 %a, {LANES}
  %a_more = icmp ult i64 %a_next, %here
  br i1 %a_more, label %add_tile, label %added
added:
  %at_next = add i64 %at, %here
  %at_more = icmp ult i64 %at_next, %end
  br i1 %at_more, label %run, label %done
done:
  ret void
}}"""


def _merge(shape: Shape) -> str:
    """Two records into the first; and a record into what attention gives."""
    size, head = shape.record_size, shape.head_size
    return f"""
define internal void @merge(ptr %into, ptr %from) {{
entry:
  br label %head
head:
  %j = phi i64 [0, %entry], [%j_next, %head_end]
  %off = mul i64 %j, {size}
  %a = getelementptr float, ptr %into, i64 %off
  %b = getelementptr float, ptr %from, i64 %off
  %a_max_at = getelementptr float, ptr %a, i64 {head}
  %b_max_at = getelementptr float, ptr %b, i64 {head}
  %a_sum_at = getelementptr float, ptr %a, i64 {head + 1}
  %b_sum_at = getelementptr float, ptr %b, i64 {head + 1}
  %a_max = load float, ptr %a_max_at
  %b_max = load float, ptr %b_max_at
  %a_sum = load float, ptr %a_sum_at
  %b_sum = load float, ptr %b_sum_at
  %is_higher = fcmp ogt float %b_max, %a_max
  %max = select i1 %is_higher, float %b_max, float %a_max
  %a_below = fsub float %a_max, %max
  %b_below = fsub float %b_max, %max
  %below_a = insertelement <16 x float> zeroinitializer, float %a_below, i64 0
  %below = insertelement <16 x float> %below_a, float %b_below, i64 1
  %shares = call <16 x float> @exp16(<16 x float> %below)
  %a_share = extractelement <16 x float> %shares, i64 0
  %b_share = extractelement <16 x float> %shares, i64 1
{chr(10).join(_broadcast("a_all", "%a_share") + _broadcast("b_all", "%b_share"))}
  %a_part = fmul float %a_sum, %a_share
  %b_part = fmul float %b_sum, %b_share
  %sum = fadd float %a_part, %b_part
  store float %max, ptr %a_max_at
  store float %sum, ptr %a_sum_at
  br label %add
add:
  %i = phi i64 [0, %head], [%i_next, %add]
  %a_at = getelementptr float, ptr %a, i64 %i
  %b_at = getelementptr float, ptr %b, i64 %i
  %a_out = load <16 x float>, ptr %a_at, align 4
  %b_out = load <16 x float>, ptr %b_at, align 4
  %scaled = fmul <16 x float> %b_out, %b_all
  %added = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %a_out, <16 x float> %a_all, <16 x float> %scaled)
  store <16 x float> %added, ptr %a_at, align 4
  %i_next = add i64 %i, {LANES}
  %i_more = icmp ult i64 %i_next, {head}
  br i1 %i_more, label %add, label %head_end
head_end:
  %j_next = add i64 %j, 1
  %j_more = icmp ult i64 %j_next, {shape.group}
  br i1 %j_more, label %head, label %end
end:
  ret void
}}

define internal void @finish(ptr %record, ptr %out) {{
entry:
  br label %head
head:
  %j = phi i64 [0, %entry], [%j_next, %head_end]
  %off = mul i64 %j, {size}
  %a = getelementptr float, ptr %record, i64 %off
  %sum_at = getelementptr float, ptr %a, i64 {head + 1}
  %sum = load float, ptr %sum_at
{chr(10).join(_broadcast("sums", "%sum"))}
  %out_off = mul i64 %j, {head}
  %y = getelementptr float, ptr %out, i64 %out_off
  br label %divide
divide:
  %i = phi i64 [0, %head], [%i_next, %divide]
  %a_at = getelementptr float, ptr %a, i64 %i
  %y_at = getelementptr float, ptr %y, i64 %i
  %value = load <16 x float>, ptr %a_at, align 4
  %divided = fdiv <16 x float> %value, %sums
  store <16 x float> %divided, ptr %y_at, align 4
  %i_next = add i64 %i, {LANES}
  %i_more = icmp ult i64 %i_next, {head}
  br i1 %i_more, label %divide, label %head_end
head_end:
  %j_next = add i64 %j, 1
  %j_more = icmp ult i64 %j_next, {shape.group}
  br i1 %j_more, label %head, label %end
end:
  ret void
}}"""


def _plan(shape: Shape) -> str:
    """A chunk for each row, part that the longest row has, and KV head."""
    return f"""
define internal i64 @length(ptr %job, i64 %row) {{
{load_data("kv_len", 4)}
{load_dim("width", 3, 1)}
  %there = mul i64 %width, {shape.page_size}
  %at = getelementptr i32, ptr %kv_len, i64 %row
  %length32 = load i32, ptr %at
  %length = zext i32 %length32 to i64
  %most = call i64 @llvm.umin.i64(i64 %length, i64 %there)
  ret i64 %most
}}

define internal i64 @part_tokens(i64 %length) {{
  %more = add i64 %length, {MOST_PARTS * PART_TOKENS - 1}
  %times = udiv i64 %more, {MOST_PARTS * PART_TOKENS}
  %some = call i64 @llvm.umax.i64(i64 %times, i64 1)
  %tokens = mul i64 %some, {PART_TOKENS}
  ret i64 %tokens
}}

define internal i64 @parts(i64 %length) {{
  %tokens = call i64 @part_tokens(i64 %length)
  %more = add i64 %length, %tokens
  %less = sub i64 %more, 1
  %whole = udiv i64 %less, %tokens
  %parts = call i64 @llvm.umax.i64(i64 %whole, i64 1)
  ret i64 %parts
}}

define internal i64 @plan(ptr %job, i64 %threads) {{
entry:
{load_dim("rows", 0, 0)}
{load_dim("heads", 1, 3)}
{load_data("scratch", 6)}
{load_dim("scratch_size", 6, 2)}
  br label %row
row:
  %b = phi i64 [0, %entry], [%b_next, %measure]
  %most = phi i64 [1, %entry], [%new_most, %measure]
  %is_row = icmp ult i64 %b, %rows
  br i1 %is_row, label %measure, label %measured
measure:
  %length = call i64 @length(ptr %job, i64 %b)
  %own = call i64 @parts(i64 %length)
  %new_most = call i64 @llvm.umax.i64(i64 %most, i64 %own)
  %b_next = add i64 %b, 1
  br label %row
measured:
  %row_parts = mul i64 %most, %rows
  %wanted = shl i64 %threads, 2
  %ranges_more = add i64 %wanted, %row_parts
  %ranges_less = sub i64 %ranges_more, 1
  %ranges_wanted = udiv i64 %ranges_less, %row_parts
  %ranges_most = call i64 @llvm.umin.i64(i64 %ranges_wanted, i64 %heads)
  %ranges0 = call i64 @llvm.umax.i64(i64 %ranges_most, i64 1)
  %each_more = add i64 %heads, %ranges0
  %each_less = sub i64 %each_more, 1
  %each = udiv i64 %each_less, %ranges0
  %across_more = add i64 %heads, %each
  %across_less = sub i64 %across_more, 1
  %ranges = udiv i64 %across_less, %each
  %chunks = mul i64 %row_parts, %ranges
{store_number("most", 0)}
{store_number("each", 1)}
{store_number("ranges", 2)}
  %is_cut = icmp ugt i64 %most, 1
  %all = mul i64 %rows, %heads
  %counts = select i1 %is_cut, i64 %all, i64 0
  %count_place = sub i64 %scratch_size, {LANES}
  br label %clear
clear:
  %i = phi i64 [0, %measured], [%i_next, %clear_one]
  %is_count = icmp ult i64 %i, %counts
  br i1 %is_count, label %clear_one, label %end
clear_one:
  %start = mul i64 %i, %scratch_size
  %count_i = add i64 %start, %count_place
  %count_at = getelementptr float, ptr %scratch, i64 %count_i
  store i32 0, ptr %count_at
  %i_next = add i64 %i, 1
  br label %clear
end:
  ret i64 %chunks
}}"""


def _chunk(shape: Shape) -> str:
    head_bytes = 4 * shape.head_size
    return f"""
define internal void @chunk(ptr %job, i64 %c) {{
entry:
{load_data("q", 0)}
{load_data("pool", 1)}
{load_data("layer_data", 2)}
{load_data("tables", 3)}
{load_data("out", 5)}
{load_data("scratch", 6)}
{load_dim("pages", 1, 2)}
{load_dim("heads", 1, 3)}
{load_dim("width", 3, 1)}
{load_dim("stride", 6, 2)}
{load_number("most", 0)}
{load_number("each", 1)}
{load_number("ranges", 2)}
  %range = urem i64 %c, %ranges
  %c_part = udiv i64 %c, %ranges
  %part = urem i64 %c_part, %most
  %row = udiv i64 %c_part, %most
  %length = call i64 @length(ptr %job, i64 %row)
  %size = call i64 @part_tokens(i64 %length)
  %parts = call i64 @parts(i64 %length)
  %is_part = icmp ult i64 %part, %parts
  br i1 %is_part, label %do, label %end
do:
  %head = mul i64 %range, %each
  %heads_left = sub i64 %heads, %head
  %heads_here = call i64 @llvm.umin.i64(i64 %heads_left, i64 %each)
  %row_start = mul i64 %row, %heads
  %row_head = add i64 %row_start, %head
  %q_i = mul i64 %row_head, {shape.group * shape.head_size}
  %q_c = getelementptr float, ptr %q, i64 %q_i
  %out_c = getelementptr float, ptr %out, i64 %q_i
  %is_empty = icmp eq i64 %length, 0
  br i1 %is_empty, label %clear, label %attend
clear:
  %out_size = mul i64 %heads_here, {shape.group * shape.head_size}
  br label %zero
zero:
  %z = phi i64 [0, %clear], [%z_next, %zero]
  %z_at = getelementptr float, ptr %out_c, i64 %z
  store <16 x float> zeroinitializer, ptr %z_at, align 4
  %z_next = add i64 %z, {LANES}
  %z_more = icmp ult i64 %z_next, %out_size
  br i1 %z_more, label %zero, label %end
attend:
  %page_tokens = mul i64 %heads, {shape.page_size}
  %page_bytes = mul i64 %page_tokens, {head_bytes}
  %half = mul i64 %pages, %page_bytes
  %layer32 = load i32, ptr %layer_data
  %layer = zext i32 %layer32 to i64
  %layer_off = mul i64 %half, %layer
  %keys_off = shl i64 %layer_off, 1
  %head_off = mul i64 %head, {shape.page_size * head_bytes}
  %keys_head = add i64 %keys_off, %head_off
  %keys = getelementptr i8, ptr %pool, i64 %keys_head
  %table_i = mul i64 %row, %width
  %table = getelementptr i32, ptr %tables, i64 %table_i
  %first = mul i64 %part, %size
  %left = sub i64 %length, %first
  %tokens = call i64 @llvm.umin.i64(i64 %left, i64 %size)
  %records_i = mul i64 %row_head, %stride
  %records = getelementptr float, ptr %scratch, i64 %records_i
  %own_i = mul i64 %part, {shape.group * shape.record_size}
  %own = getelementptr float, ptr %records, i64 %own_i
  call void @part(ptr %q_c, ptr %keys, i64 %half, ptr %table, i64 %heads_here, i64 %first, i64 %tokens, ptr %own, i64 %stride)
  %is_whole = icmp eq i64 %parts, 1
  %parts32 = trunc i64 %parts to i32
  %last = sub i32 %parts32, 1
  %count_i = sub i64 %stride, {LANES}
  br label %settle
settle:
  %h = phi i64 [0, %attend], [%h_next, %settled]
  %h_i = mul i64 %h, %stride
  %record = getelementptr float, ptr %records, i64 %h_i
  br i1 %is_whole, label %finish, label %count
count:                                        ; whoever does a head's last part merges them
  %count_at = getelementptr float, ptr %record, i64 %count_i
  %before = atomicrmw add ptr %count_at, i32 1 acq_rel
  %is_last = icmp eq i32 %before, %last
  br i1 %is_last, label %merge, label %settled
merge:
  %p = phi i64 [1, %count], [%p_next, %merge]
  %p_i = mul i64 %p, {shape.group * shape.record_size}
  %p_at = getelementptr float, ptr %record, i64 %p_i
  call void @merge(ptr %record, ptr %p_at)
  %p_next = add i64 %p, 1
  %p_more = icmp ult i64 %p_next, %parts
  br i1 %p_more, label %merge, label %finish
finish:
  %out_i = mul i64 %h, {shape.group * shape.head_size}
  %out_h = getelementptr float, ptr %out_c, i64 %out_i
  call void @finish(ptr %record, ptr %out_h)
  br label %settled
settled:
  %h_next = add i64 %h, 1
  %h_more = icmp ult i64 %h_next, %heads_here
  br i1 %h_more, label %settle, label %end
end:
  ret void
}}"""
