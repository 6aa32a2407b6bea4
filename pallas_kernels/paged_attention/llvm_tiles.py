"""LLVM IR for 16 tokens and a few query heads that share a KV head, with sums in registers: scores, and weighted
values."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.llvm.page_values import load_values

LANES = 16  # of a vector, and tokens of a tile
PART_TOKENS = 128  # a context's part has this many tokens, or a multiple
TOKENS_AHEAD = 32  # how far keys are prefetched ahead of the scores: whole tiles
_LINE = 64  # bytes
_RUN_BYTES = 1 << 17  # of keys, and as much of values: they stay in the second-level cache


@dataclass(frozen=True)
class DecodeShape:
    """What is known when a program is traced."""

    num_kv_heads: int
    group: int  # query heads of a KV head
    head_size: int
    page_size: int
    value_bytes: int = 4  # of the pool: float32, or codes of float8

    @property
    def token_bytes(self) -> int:
        """Of one KV head."""
        return self.value_bytes * self.head_size

    @property
    def vectors(self) -> int:
        """Vectors of a head."""
        return self.head_size // LANES

    @property
    def record_size(self) -> int:
        """Numbers of one query head's record: its sum of values, and a vector whose first two elements are the maximum
        score and the sum of weights."""
        return self.head_size + LANES

    @property
    def run_tokens(self) -> int:
        """A power of two that divides PART_TOKENS."""
        tokens = PART_TOKENS
        while tokens > LANES and tokens * self.num_kv_heads * self.token_bytes > _RUN_BYTES:
            tokens //= 2
        return tokens


def loop(i: str, limit: str | int, step: int, body: str, *, start: str = "0", carried: tuple[tuple[str, str, str, str], ...] = ()) -> str:
    """IR that runs `body` for %i from `start` below `limit`, at least once. `carried`: (type, name, first value, next
    value)."""
    phis = "".join(f"\n %{name} = phi {kind} [{first}, %{i}_from], [{last}, %{i}_end]" for kind, name, first, last in carried)
    return f""" br label %{i}_from
{i}_from:
 br label %{i}_loop
{i}_loop:
 %{i} = phi i64 [{start}, %{i}_from], [%{i}_next, %{i}_end]{phis}
{body}
 br label %{i}_end
{i}_end:
 %{i}_next = add i64 %{i}, {step}
 %{i}_more = icmp ult i64 %{i}_next, {limit}
 br i1 %{i}_more, label %{i}_loop, label %{i}_done
{i}_done:"""


def broadcast(name: str, value: str, kind: str = "float") -> str:
    """IR that sets %name to 16 times a value."""
    return (
        f" %{name}_one = insertelement <16 x {kind}> poison, {kind} {value}, i64 0\n"
        f" %{name} = shufflevector <16 x {kind}> %{name}_one, <16 x {kind}> poison, <16 x i32> zeroinitializer"
    )


def score_name(count: int, *, fetches: bool) -> str:
    return f"score_{count}{'_fetching' if fetches else ''}"


def score(shape: DecodeShape, count: int, *, fetches: bool) -> str:
    """Scores of a tile for some query heads, and their maxima so far lane by lane. `offsets`, in bytes, are those of
    the tokens' keys and, from `values` on, values. Only the first `valid` tokens are in the context. Heads' scores are
    a run apart, their maxima a vector."""
    lines = [
        f"define internal void @{score_name(count, fetches=fetches)}"
        "(ptr %q, ptr %keys, ptr %values, ptr %offsets, i64 %valid, ptr %scores, ptr %tops) {",
        " %valid32 = trunc i64 %valid to i32",
        broadcast("limit", "%valid32", "i32"),
        f" %is_valid = icmp ult <16 x i32> <{', '.join(f'i32 {i}' for i in range(LANES))}>, %limit",
    ]
    for j in range(count):
        for v in range(shape.vectors):
            lines += [
                f" %q_at{j}_{v} = getelementptr float, ptr %q, i64 {j * shape.head_size + v * LANES}",
                f" %q{j}_{v} = load <16 x float>, ptr %q_at{j}_{v}, align 4",
            ]
    lines += _dots(shape, count, fetches=fetches)
    for j in range(count):
        lines += [
            # -infinity
            f" %score{j} = select <16 x i1> %is_valid, <16 x float> %dots{j}, <16 x float> splat (float 0xFFF0000000000000)",
            f" %score_at{j} = getelementptr float, ptr %scores, i64 {j * shape.run_tokens}",
            f" store <16 x float> %score{j}, ptr %score_at{j}, align 64",
            f" %top_at{j} = getelementptr float, ptr %tops, i64 {j * LANES}",
            f" %top{j} = load <16 x float>, ptr %top_at{j}, align 64",
            # false for NaN, which reappears in the weights
            f" %is_higher{j} = fcmp ogt <16 x float> %score{j}, %top{j}",
            f" %new_top{j} = select <16 x i1> %is_higher{j}, <16 x float> %score{j}, <16 x float> %top{j}",
            f" store <16 x float> %new_top{j}, ptr %top_at{j}, align 64",
        ]
    return "\n".join([*lines, " ret void", "}"])


# How two vectors of partial sums become one with half as many for each token. These lanes of both are added to the
# lanes that much further on. After four folds a lane is a token, in order. The first two stay within 128 bits, which is
# cheaper.
_LOWER_HALVES = (
    ([q + i + s for q in (0, 4, 8, 12) for i in (0, 1) for s in (0, 16)], 2),
    ([q + i + s for q in (0, 4, 8, 12) for s in (0, 16) for i in (0, 1)], 2),
    ([b + s + i for s in (0, 16) for b in (0, 8) for i in range(4)], 4),
    ([b + s + i for s in (0, 16) for b in (0, 8) for i in range(4)], 4),
)


def _dots(shape: DecodeShape, count: int, *, fetches: bool) -> list[str]:
    """%dots0, ...: the tokens' keys times each query. Partial sums are folded as soon as two can be, so that few stay
    in registers."""
    lines: list[str] = []
    waiting: list[list[tuple[int, str]]] = [[] for _ in range(count)]  # by head: how often it was folded, its name
    for i in range(LANES):
        lines += [
            f" %k_off_at{i} = getelementptr i64, ptr %offsets, i64 {i}",
            f" %k_off{i} = load i64, ptr %k_off_at{i}",
            f" %k_at{i} = getelementptr i8, ptr %keys, i64 %k_off{i}",
        ]
        if fetches:
            lines += [
                f" %ahead_off_at{i} = getelementptr i64, ptr %offsets, i64 {i + TOKENS_AHEAD}",
                f" %ahead_off{i} = load i64, ptr %ahead_off_at{i}",
                *_fetch(shape, "keys", f"ahead_off{i}"),
                *_fetch(shape, "values", f"k_off{i}"),
            ]
        for v in range(shape.vectors):
            lines += [
                f" %k_at{i}_{v} = getelementptr i8, ptr %k_at{i}, i64 {v * LANES * shape.value_bytes}",
                *load_values(f"k{i}_{v}", f"%k_at{i}_{v}", shape.value_bytes),
            ]
            for j in range(count):
                name, q, k = f"%dot{j}_{i}_{v}", f"%q{j}_{v}", f"%k{i}_{v}"
                lines.append(multiply_add(name, q, k, f"%dot{j}_{i}_{v - 1}") if v else f" {name} = fmul <16 x float> {q}, {k}")
        for j in range(count):
            level, last = 0, f"dot{j}_{i}_{shape.vectors - 1}"
            while waiting[j] and waiting[j][-1][0] == level:
                _, first = waiting[j].pop()
                name = f"dots{j}" if level == 3 else f"folded{j}_{level}_{i}"
                lower, further = _LOWER_HALVES[level]
                for half, shift in (("lower", 0), ("upper", further)):
                    lanes = ", ".join(f"i32 {lane + shift}" for lane in lower)
                    lines.append(f" %{name}_{half} = shufflevector <16 x float> %{first}, <16 x float> %{last}, <16 x i32> <{lanes}>")
                lines.append(f" %{name} = fadd <16 x float> %{name}_lower, %{name}_upper")
                level, last = level + 1, name
            waiting[j].append((level, last))
    return lines


def _fetch(shape: DecodeShape, base: str, offset: str) -> list[str]:
    """Prefetches a token's key or value: memory latency exceeds what processors look ahead by themselves."""
    lines = [f" %{base}_{offset} = getelementptr i8, ptr %{base}, i64 %{offset}"]
    for v in range(-(-shape.token_bytes // _LINE)):
        lines += [
            f" %{base}_{offset}_{v} = getelementptr i8, ptr %{base}_{offset}, i64 {v * _LINE}",
            f" call void @llvm.prefetch.p0(ptr %{base}_{offset}_{v}, i32 0, i32 3, i32 1)",
        ]
    return lines


def add(shape: DecodeShape, count: int) -> str:
    """Adds the weighted values of up to a tile's tokens to the records of some query heads, whose weights are a run
    apart."""
    cells = [(j, v) for j in range(count) for v in range(shape.vectors)]
    lines = [f"define internal void @add_{count}(ptr %values, ptr %offsets, i64 %tokens, ptr %weights, ptr %records) {{"]
    for j, v in cells:
        lines += [
            f" %at{j}_{v} = getelementptr float, ptr %records, i64 {j * shape.record_size + v * LANES}",
            f" %before{j}_{v} = load <16 x float>, ptr %at{j}_{v}, align 4",
        ]
    token = [
        " %offset_at = getelementptr i64, ptr %offsets, i64 %t",
        " %offset = load i64, ptr %offset_at",
        " %value = getelementptr i8, ptr %values, i64 %offset",
    ]
    for v in range(shape.vectors):
        token += [
            f" %value_at{v} = getelementptr i8, ptr %value, i64 {v * LANES * shape.value_bytes}",
            *load_values(f"value{v}", f"%value_at{v}", shape.value_bytes),
        ]
    for j in range(count):
        token += [
            f" %weight_i{j} = add i64 %t, {j * shape.run_tokens}",
            f" %weight_at{j} = getelementptr float, ptr %weights, i64 %weight_i{j}",
            f" %weight{j} = load float, ptr %weight_at{j}, align 4",
            broadcast(f"weights{j}", f"%weight{j}"),
        ]
    token += [multiply_add(f"%new{j}_{v}", f"%weights{j}", f"%value{v}", f"%sum{j}_{v}") for j, v in cells]
    sums = tuple(("<16 x float>", f"sum{j}_{v}", f"%before{j}_{v}", f"%new{j}_{v}") for j, v in cells)
    lines.append(loop("t", "%tokens", 1, "\n".join(token), carried=sums))
    lines += [f" store <16 x float> %new{j}_{v}, ptr %at{j}_{v}, align 4" for j, v in cells]
    return "\n".join([*lines, " ret void", "}"])


def multiply_add(result: str, a: str, b: str, c: str) -> str:
    """IR that sets result to a * b + c, 16 of each."""
    return f" {result} = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> {a}, <16 x float> {b}, <16 x float> {c})"
