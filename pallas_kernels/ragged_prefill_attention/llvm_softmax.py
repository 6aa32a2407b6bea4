"""LLVM IR for the softmax of a few rows over one run of context tokens, and for the state that it keeps from run to
run."""

from __future__ import annotations

from pallas_kernels.llvm.exponential import splat
from pallas_kernels.ragged_prefill_attention.llvm_blocking import LANES, VECTOR, PrefillBlocking

MASKED = -1e30
_MAX_GROWTH = 8.0  # of a weight, as a logarithm to base 2
_ROUNDER = 1.5 * 2**23
_POWERS = (1.0, 0.6931469440460205, 0.24022120237350464, 0.05550713464617729, 0.009675540961325169, 0.0013276470126584172)


def softmax(blocking: PrefillBlocking) -> str:
    """IR of `mask` and `update_softmax`."""
    return "\n".join([_MAXIMUM, _power(), _mask(blocking), _update_softmax(blocking)])


_MAXIMUM = f"""
declare {VECTOR} @llvm.fma.v16f32({VECTOR}, {VECTOR}, {VECTOR})
define internal {VECTOR} @max16({VECTOR} %a, {VECTOR} %b) alwaysinline {{
  %is_more = fcmp ogt {VECTOR} %a, %b
  %most = select <{LANES} x i1> %is_more, {VECTOR} %a, {VECTOR} %b
  ret {VECTOR} %most
}}"""


def _mask(blocking: PrefillBlocking) -> str:
    """Masks tokens after a row's own. `ahead`: how far the tile's first token is past the run's; `row`: the first of
    these rows in the tile."""
    lines = []
    for i in range(blocking.at_once):
        lines += [
            f"  %row{i} = add i64 %row, {i}",
            f"  %token{i} = udiv i64 %row{i}, {blocking.group}",
            f"  %own{i} = add i64 %ahead, %token{i}",
            f"  %own32_{i} = trunc i64 %own{i} to i32",
            f"  %own_first{i} = insertelement <{LANES} x i32> poison, i32 %own32_{i}, i64 0",
            f"  %owns{i} = shufflevector <{LANES} x i32> %own_first{i}, <{LANES} x i32> poison, <{LANES} x i32> zeroinitializer",
        ]
        for j in range(blocking.run // LANES):
            tokens = ", ".join(f"i32 {j * LANES + lane}" for lane in range(LANES))
            lines += [
                f"  %at{i}_{j} = getelementptr float, ptr %scores, i64 {i * blocking.run + j * LANES}",
                f"  %score{i}_{j} = load {VECTOR}, ptr %at{i}_{j}, align 4",
                f"  %sees{i}_{j} = icmp sge <{LANES} x i32> %owns{i}, <{tokens}>",
                f"  %masked{i}_{j} = select <{LANES} x i1> %sees{i}_{j}, {VECTOR} %score{i}_{j}, {VECTOR} {splat(MASKED)}",
                f"  store {VECTOR} %masked{i}_{j}, ptr %at{i}_{j}, align 4",
            ]
    return "\n".join(["define internal void @mask(ptr %scores, i64 %row, i64 %ahead) {", *lines, "  ret void", "}"])


def _update_softmax(blocking: PrefillBlocking) -> str:
    """Turns scores, which are logarithms to base 2, into weights. `tops`: what is subtracted from them first, a lane a
    row. It is each row's maximum, but it is raised only when some row has a score beyond it by more than weights may
    grow. `sums`: of weights, 16 lanes a row. `rescales`: factors for what was summed under the old tops."""
    parts, rows = range(blocking.run // LANES), range(blocking.at_once)
    lines = [
        f"  %top = load {VECTOR}, ptr %tops, align 4",
        f"  %roof = fadd {VECTOR} %top, {splat(_MAX_GROWTH)}",
    ]
    for i in rows:
        for j in parts:
            lines += [
                f"  %at{i}_{j} = getelementptr float, ptr %scores, i64 {i * blocking.run + j * LANES}",
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
        f"  %rescale = phi {VECTOR} [{splat(1.0)}, %entry], [%power, %raise]",
        f"  store {VECTOR} %rescale, ptr %rescales, align 4",
    ]
    for i in rows:
        lines += [
            f"  %top{i} = shufflevector {VECTOR} %new_top, {VECTOR} poison, <{LANES} x i32> <{_lane(i)}>",
            f"  %rescale{i} = shufflevector {VECTOR} %rescale, {VECTOR} poison, <{LANES} x i32> <{_lane(i)}>",
            f"  %sum_at{i} = getelementptr float, ptr %sums, i64 {i * LANES}",
            f"  %sum{i} = load {VECTOR}, ptr %sum_at{i}, align 4",
            f"  %total{i}_0 = fmul {VECTOR} %sum{i}, %rescale{i}",
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
        ["define internal void @update_softmax(ptr %scores, ptr %tops, ptr %sums, ptr %rescales) {", "entry:", *lines, "  ret void", "}"]
    )


def _lane(lane: int) -> str:
    return ", ".join([f"i32 {lane}"] * LANES)


def _power() -> str:
    """2 to numbers up to 100, relative error below 3e-7; 0 below -125; NaN of NaN. A number is rounded by adding one so
    large that its last bit counts 1; those bits are then the exponent."""
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
