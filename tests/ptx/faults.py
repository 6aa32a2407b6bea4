"""Faults in a kernel's PTX: each has no longer one of the fences, barriers, arrivals or waits that keep threads, copies and products in order."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.ptx.launch import Launch
from tests.ptx.machine import run
from tests.ptx.ordering import RaceError

_SECONDS = 30  # after which a run hangs

# What keeps threads, copies and products in order, by how the instruction begins; nothing else in these kernels does (`unknown_in`).
_ORDERING = (
    "fence.proxy.async",
    "fence.mbarrier_init",
    "bar.sync",
    "mbarrier.init",
    "mbarrier.arrive.expect_tx",
    "mbarrier.arrive",
    "mbarrier.try_wait",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
)
# Of these, several with none of the others' instructions between them are taken out together: either does what the other does.
_TOGETHER = {
    "bar.sync": r"ld\.shared|st\.shared|ldmatrix|stmatrix|mbarrier|cp\.async|wgmma\.mma|wgmma\.wait|bra|ret|\$",
    "fence.proxy.async": r"ld\.shared|st\.shared|ldmatrix|stmatrix|mbarrier|cp\.async|wgmma\.mma|wgmma\.wait|bra|ret|\$",
    "wgmma.fence": r"wgmma\.mma|wgmma\.wait|bra|ret|\$",
}
# An instruction, what waits for an mbarrier, which is a loop, a product, which is an instruction with another before it, or a label.
_PART = re.compile(
    r"\{\s*\.reg \.pred\s+P1;[^{}]*?(mbarrier\.try_wait)[^{}]*?\}|\{ \.reg \.pred p; setp[^;]*; (wgmma\.mma_async)[^;]*;"
    r"|^[ \t]*(?:@!?%p\d+[ \t]+)?([a-z][\w.:]*)[^;\n]*;|^(\$L__BB\w+):",
    re.MULTILINE,
)
_ORDERS = re.compile(r"(fence|membar|bar|barrier|mbarrier|atom|red|griddepcontrol)\b|.*(commit_group|wait_group|wait_all|acquire|release)")


@dataclass(frozen=True)
class Run:
    """A launch, and its operands and results before it ran, and after. Where an array is there twice it is the same one."""

    launch: Launch
    before: tuple[np.ndarray, ...]
    places: tuple[int, ...]  # of each array the first place that it is at
    after: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, launch: Launch, arrays: Sequence[np.ndarray], **options: Any) -> Run:
        """Runs it."""
        before = tuple(array.copy() for array in arrays)
        places = tuple(next(j for j, other in enumerate(arrays) if other is array) for array in arrays)
        run(launch, arrays, **options)
        return cls(launch, before, places, tuple(array.copy() for array in arrays))

    def arrays(self) -> list[np.ndarray]:
        """Operands and results to run it with."""
        fresh = [array.copy() for array in self.before]
        return [fresh[place] for place in self.places]


@dataclass(frozen=True)
class Mutation:
    kind: str
    place: str  # of the kernel's source
    ptx: str
    reached: str  # the same PTX with a trap there


@dataclass(frozen=True)
class Outcome:
    mutation: Mutation
    found: str  # how, or why not
    message: str = ""

    @property
    def is_found(self) -> bool:
        return self.found not in ("NOT FOUND", "not reached")


def mutations_of(ptx: str) -> Iterator[Mutation]:
    """One for each instruction that orders others, or few that do so together: without it. And barriers that expect half as many arrivals or no
    bytes, and waits that leave a group behind."""
    together: dict[str, list[re.Match[str]]] = {kind: [] for kind in _TOGETHER}
    for match in _PART.finditer(ptx):
        name = _name(match)
        for kind, ends in _TOGETHER.items():
            if re.match(ends, name) and together[kind]:
                yield _replaced(ptx, together.pop(kind), kind, "")
                together[kind] = []
        kind = next((kind for kind in _ORDERING if name.startswith(kind)), "")
        if not kind:
            continue
        if kind in together:
            together[kind].append(match)
            continue
        yield _replaced(ptx, [match], kind, "")
        text = match[0]
        if kind == "mbarrier.init":
            register = re.search(r"(%r\d+);$", text)
            assert register, text
            if (count := _constant(ptx[: match.start()], register[1])) > 1:
                yield _replaced(ptx, [match], "mbarrier.init of half", text.replace(f"{register[1]};", f"{count // 2};"))
        if kind == "mbarrier.arrive.expect_tx":
            yield _replaced(ptx, [match], "expect_tx of nothing", re.sub(r"%r\d+;$", "0;", text))
        if kind.endswith("wait_group"):
            yield _replaced(ptx, [match], f"{kind} of one less", re.sub(r"(\d+);$", lambda number: f"{int(number[1]) + 1};", text))


def unknown_in(ptx: str) -> set[str]:
    """Instructions that order others and that no mutation is made of."""
    names = {_name(match) for match in _PART.finditer(ptx)}
    return {name for name in names if _ORDERS.match(name) and not name.startswith(_ORDERING)}


def _name(part: re.Match[str]) -> str:
    return next(group for group in part.groups() if group)


def _replaced(ptx: str, parts: Sequence[re.Match[str]], kind: str, text: str) -> Mutation:
    pieces, end = [], 0
    for part in parts:
        pieces.append(ptx[end : part.start()])
        end = part.end()
    after = ptx[end:]
    return Mutation(
        f"{kind}", _place(ptx, parts[0].start()), f"\n{text}\n".join(pieces) + f"\n{text}\n{after}", f"{pieces[0]}\ntrap;\n{after}"
    )


def _place(ptx: str, at: int) -> str:
    """File and line that an instruction comes from."""
    found = re.findall(r"\.loc\s+(\d+) (\d+)", ptx[:at])
    names = dict(re.findall(r'\.file\s+(\d+) "([^"]*)"', ptx))
    return next((f"{Path(names[number]).name}:{line}" for number, line in reversed(found) if line != "0"), "start")


def _constant(before: str, register: str) -> int:
    found = re.findall(rf"mov\.b32\s+{register}, (\d+);", before)
    return int(found[-1])


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def outcome_of(sound: Run, mutation: Mutation, seeds: Sequence[int]) -> Outcome:
    """Runs a faulty kernel until a seed finds the fault."""
    for seed in seeds:
        arrays = sound.arrays()
        try:
            with _limited():
                run(replace(sound.launch, ptx=mutation.ptx), arrays, seed=seed, num_resident=2)
        except RaceError as error:
            return Outcome(mutation, "race", str(error))
        except TimeoutError:
            return Outcome(mutation, "deadlock", f"no end in {_SECONDS} s")
        except RuntimeError as error:
            return Outcome(mutation, "deadlock", str(error))
        except AssertionError as error:
            return Outcome(mutation, "other error", str(error) or repr(error))
        if not all(_is_same(found, expected) for found, expected in zip(arrays, sound.after, strict=True)):
            return Outcome(mutation, "wrong result")
    try:
        run(replace(sound.launch, ptx=mutation.reached), sound.arrays(), seed=seeds[0], num_resident=2)
    except RuntimeError:
        return Outcome(mutation, "NOT FOUND")
    return Outcome(mutation, "not reached")


def _is_same(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.tobytes() == expected.tobytes()
