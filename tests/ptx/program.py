"""PTX as text, and as steps."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.ptx.arithmetic import arithmetic
from tests.ptx.between_threads import CONTROL
from tests.ptx.block import Step, Warp
from tests.ptx.registers import ALL, operands_of


def steps_of(ptx: str) -> list[Step]:
    """Of the one kernel in it."""
    text = re.sub(r"//.*", "", ptx[ptx.index(".entry") :])
    body = text[text.index("\n{") + 2 : text.index("$L__func_end")].rstrip().removesuffix("}")
    body = re.sub(r"^\s*\.(loc|reg|pragma|shared|file|section)\b.*$", "", body, flags=re.MULTILINE)
    # What waits for a barrier is a loop around one instruction: it becomes that instruction.
    body = re.sub(r"\{\s*LAB_WAIT:\s*(mbarrier\.try_wait.*?;).*?DONE:\s*\}", r"\1", body, flags=re.DOTALL)
    # And so does a product, from what says whether it adds to what there is.
    body = re.sub(r"\{\s*\.reg \.pred p; setp\.ne\.b32 p, (\S+), 0; (wgmma[^;]*), p, ([^;]*);\s*\}", r"\2, \1, \3;", body)
    body = re.sub(r"^\s*[{}]\s*$", "", body, flags=re.MULTILINE)
    # Names of inline assembly's own, of 32 bits and of 16.
    body = re.sub(r"\bresult_pair(\d+)", r"%rpair\1", body)
    body = re.sub(r"\bsource_pair(\d+)", r"%rspair\1", body)
    body = re.sub(r"\$L__tmp\d+:|\$L__func_\w+:", "", body)
    labels: dict[str, int] = {}
    lines: list[str] = []
    for piece in re.split(r";|(?<=:)\s", body):
        line = " ".join(piece.split())
        if line.endswith(":"):
            labels[line[:-1]] = len(lines)
        elif line:
            lines.append(line)
    has_products = "wgmma.mma_async" in body
    return [_checked(line, _step(line, labels)) if has_products else _step(line, labels) for line in lines]


def _checked(line: str, step: Step) -> Step:
    """That it uses no register of a product that runs by itself. Products know of each other."""
    read, written = registers_of(line)
    if line.startswith("wgmma") or not read | written:
        return step

    def checked(warp: Warp) -> Any:
        warp.check_registers(read, written)
        return step(warp)

    return checked


# Instructions that write no register.
_ONLY_READ = ("st", "stmatrix", "red", "bar", "cp", "bra", "prefetch", "fence", "membar", "setmaxnreg", "ret")


def registers_of(line: str) -> tuple[frozenset[str], frozenset[str]]:
    """Which an instruction reads, and which it writes."""
    guard = re.match(r"@!?(%\w+)\s+(.*)", line)
    name, _, rest = (guard[2] if guard else line).partition(" ")
    operands = operands_of(rest)
    writes = name.split(".")[0] not in _ONLY_READ and not name.startswith("mbarrier.init")
    written = frozenset(re.findall(r"%\w+", operands[0])) if writes and operands else frozenset()
    read = frozenset(re.findall(r"%\w+", " ".join(operands[1:] if writes else operands)))
    return (read | {guard[1]} if guard else read), written


def _step(line: str, labels: dict[str, int]) -> Step:
    guard = re.match(r"@(!?)(%\w+)\s+(.*)", line)
    text = guard[3] if guard else line
    name, _, rest = text.partition(" ")
    operands = operands_of(rest)

    def active(warp: Warp) -> np.ndarray:
        if guard is None:
            return ALL
        return warp.get(guard[2]) ^ bool(guard[1])

    parts = name.split(".")
    if parts[0] == "bra":
        target = labels[operands[0]]

        def branch(warp: Warp) -> int | None:
            mask = active(warp)
            assert mask.all() or not mask.any(), f"threads of a warp part at {line}"
            return target if mask.all() else None

        return branch
    if parts[0] in CONTROL:
        return CONTROL[parts[0]](parts, operands, active)
    compute = arithmetic(parts, operands)
    if guard is None:
        return compute

    def guarded(warp: Warp) -> None:
        mask = active(warp)
        before = dict(warp.registers)
        compute(warp)
        for register, value in warp.registers.items():
            if (old := before.get(register)) is not value:
                warp.registers[register] = value if old is None else np.where(mask, value, old)

    return guarded
