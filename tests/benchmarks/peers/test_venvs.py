from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import venvs
from benchmarks.peers.venvs import PeerUnavailable, Recipe, provide, requirements

FAKE = """#!/bin/sh
printf '%s\\n' "$*" >> calls
case "$*" in
  *broken*) echo "WARNING: something else" >&2; echo "ERROR: no such package: broken" >&2; exit 1 ;;
  *importlib.metadata*) printf 'torch==2.10.0+cpu\\nregex\\npandas; extra == "bench"\\nnumba==0.61.2; platform_machine != "s390x"\\n' ;;
  *) printf '%s' "$FLAVOUR" > flavour ;;
esac
"""
RECIPE = Recipe(".venv-fake", ".installed-1", (("--no-deps", "package==1"), ("torch",)), "package", ("torch",), {"FLAVOUR": "native"})


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with an environment whose Python writes down what it is told."""
    python = tmp_path / ".venv-fake/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE)
    python.chmod(0o755)
    monkeypatch.setattr(venvs, "ROOT", tmp_path)
    return tmp_path


def installed(root: Path) -> list[str]:
    """What pip was told to install, call by call."""
    pip = " ".join(venvs.PIP)
    lines = (root / "calls").read_text().splitlines() if (root / "calls").exists() else []
    return [line.removeprefix(pip).strip() for line in lines if line.startswith(pip)]


def test_an_environment_is_made_step_by_step_and_only_once(root: Path) -> None:
    said: list[str] = []
    provide(RECIPE, installs=True, say=said.append)
    assert installed(root) == ["--no-deps package==1", "torch", 'regex numba==0.61.2; platform_machine != "s390x"']
    assert (root / "flavour").read_text() == "native"
    assert said == ["making .venv-fake (some minutes, once)"]
    provide(RECIPE, installs=True, say=said.append)
    assert len(installed(root)) == 3 and len(said) == 1


def test_another_version_is_installed_anew(root: Path) -> None:
    provide(RECIPE, installs=True, say=lambda text: None)
    provide(replace(RECIPE, stamp=".installed-2"), installs=True, say=lambda text: None)
    assert len(installed(root)) == 6


def test_nothing_is_made_unless_it_is_allowed(root: Path) -> None:
    with pytest.raises(PeerUnavailable, match="--install"):
        provide(RECIPE, installs=False)
    assert installed(root) == []


def test_a_peer_whose_environment_fails_is_absent_with_pips_error(root: Path) -> None:
    broken = replace(RECIPE, steps=(("broken",), ("never",)))
    with pytest.raises(PeerUnavailable, match=r"can't be made here: ERROR: no such package: broken"):
        provide(broken, installs=True, say=lambda text: None)
    assert installed(root) == ["broken"]
    assert not broken.is_made


def test_requirements_leave_out_extras_and_what_is_installed_otherwise() -> None:
    lines = [
        "torch==2.10.0+cpu; platform_machine == 'x86_64'",
        "torchaudio",
        "Torch_Vision>=1",
        "torch-geometric",
        'pandas; extra == "x"',
        "",
    ]
    assert requirements(lines, ("torch", "torchaudio", "torch-vision")) == ["torch-geometric"]


def test_no_recipe_names_an_index() -> None:
    words = json.dumps([recipe.steps for recipe in (venvs.PARITY, venvs.LLAMA_CPP, venvs.VLLM)])
    assert not any(word in words for word in ("index", "find-links", "://", "/"))
