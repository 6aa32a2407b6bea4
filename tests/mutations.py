"""`python -m tests.mutations`: the faults of tests/mutations.md, each put into a copy of the project, and whether its tests find it.

A suite is shortened safely as long as every fault is still found. Faults are patches by text, not by line number: each old text stands once in its file,
which tests/test_mutations.py checks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/mutations.md"
_ENTRY = re.compile(
    r"^## (?P<number>\d+)\. (?P<title>[^\n]+)\n\nIn `(?P<path>[^`]+)`, found by (?P<tests>`[^\n]+`):\n\n```diff\n(?P<patch>.+?)^```$",
    re.MULTILINE | re.DOTALL,
)
_TESTS_FAILED = 1  # pytest's exit status; others are of runs that never came to a test
_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault, and the tests that must find it."""

    number: int
    title: str
    path: str
    tests: tuple[str, ...]
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """The file's text with the fault. Raises `ValueError` where the old text does not stand there exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"mutation {self.number}: its old text stands {count} times in {self.path}: write the patch anew")
        return text.replace(self.old, self.new)


def read(path: Path = LIST) -> list[Mutation]:
    """The list's mutations, in order."""
    return [_parsed(found) for found in _ENTRY.finditer(path.read_text(encoding="utf-8"))]


def _parsed(found: re.Match[str]) -> Mutation:
    lines = found["patch"].splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
    return Mutation(int(found["number"]), found["title"], found["path"], tuple(re.findall(r"`([^`]+)`", found["tests"])), old, new)


def run(mutations: Sequence[Mutation], folder: Path) -> Iterator[tuple[Mutation, str, float]]:
    """Each mutation with what its tests made of it ("found", "SURVIVED", or what else pytest came to) and the seconds taken. `folder` has a copy of the
    project."""
    for mutation in mutations:
        path, began = folder / mutation.path, time.monotonic()
        text = path.read_text(encoding="utf-8")
        path.write_text(mutation.applied_to(text), encoding="utf-8")
        try:
            status = _test(mutation.tests, folder)
        finally:
            path.write_text(text, encoding="utf-8")
        result = {0: "SURVIVED", _TESTS_FAILED: "found", None: f"found: no end within {_SECONDS:g} s"}
        yield mutation, result.get(status, f"BROKEN: pytest's exit status {status}"), time.monotonic() - began


def _test(tests: Sequence[str], folder: Path) -> int | None:
    """pytest's exit status, None where it came to no end."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def copy_project(folder: Path) -> None:
    """All tracked files as they are in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 1 where a mutation survived or its tests did not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("numbers", nargs="*", type=int, help="of the list (default: all)")
    parser.add_argument("--unchanged", action="store_true", help="first run all these tests without a fault: they must pass")
    options = parser.parse_args(arguments)
    mutations = [m for m in read() if not options.numbers or m.number in options.numbers]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        if options.unchanged and _test(sorted({test for m in mutations for test in m.tests}), folder) != 0:
            parser.exit(1, "the tests fail without a fault\n")
        num_found = 0
        for mutation, result, seconds in run(mutations, folder):
            num_found += result.startswith("found")
            print(f"{mutation.number:3}  {result}  {seconds:5.1f} s  {mutation.path}: {mutation.title}", flush=True)
    print(f"{num_found} of {len(mutations)} are found")
    sys.exit(num_found < len(mutations))


if __name__ == "__main__":
    main()
