"""What runs on a borrowed card is ready for it: kernels' tests, and each kernel's variants."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import smoke
from benchmarks.gpu.problem import KernelCheck, Problem
from benchmarks.gpu.stand_ins import NOT_NEEDED
from pallas_kernels.mosaic.warpgroup import Warpgroup
from tests.card import _always

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.exhaustive  # collects a folder in two more processes
def test_kernels_tests_need_no_packages_that_such_a_machine_lacks():
    hidden = f"""
import sys
from importlib.machinery import PathFinder
from functools import partial
absent = {(*NOT_NEEDED, "fastapi", "uvicorn")!r}
PathFinder.find_spec = partial(lambda find, name, *rest: None if name.partition(".")[0] in absent else find(name, *rest), PathFinder.find_spec)
import glob, pytest
files = [*glob.glob("tests/kernels/test_*_gpu.py"), "tests/kernels/test_split_combine.py"]
sys.exit(pytest.main(["--noconftest", "-p", "tests.card", "-q", *sys.argv[1:], *files]))
"""
    collected, run = (
        subprocess.run([sys.executable, "-c", hidden, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
        for arguments in (["--collect-only"], ["-k", "counts_for_what_it_weighs"])
    )
    assert collected.returncode == 0 and collected.stdout.count("::test_") > 60, collected.stdout[-2000:]
    assert run.returncode == 2 and "JAX finds no GPU, only cpu" in run.stdout


def test_on_a_card_nothing_is_interpreted(monkeypatch):
    monkeypatch.setattr(Warpgroup, "interpreted", _always(False), raising=False)
    monkeypatch.setattr(Warpgroup, "has_wgmma", _always(False))
    warpgroup = Warpgroup(interpreted=True)
    assert warpgroup.interpreter is False and not warpgroup.is_asynchronous


def test_variants_are_of_every_kernel_and_tilings_are_theirs():
    made = {name: make() for name, make in smoke.VARIANTS.items()}
    kernels = {"paged_attention", "ragged_prefill_attention", "latent_prefill_attention", "grouped_matmul", "write_and_attend"}
    assert {variant.kernel for variant in made.values()} == kernels
    for variant in made.values():
        tiling = variant.function.keywords.get("tiling")
        assert not variant.tiling or tiling.__dict__.items() >= variant.tiling.items()


@pytest.mark.parametrize("name", ["decode, one tile", pytest.param("experts, fp8", marks=pytest.mark.exhaustive)])
def test_on_a_cpu_variants_are_right_where_they_are_interpreted(name):
    found = smoke.run(name, 1, is_interpreted=True)
    assert found["failure"] is None and found["num_different"] == 0 and found["row_error"] > 0


def test_a_variant_that_is_right_wrong_slow_or_dead_is_a_line(monkeypatch, capsys, tmp_path):
    said = {
        "right": 'print(\'{"failure": null, "num_different": 0, "num_repeats": 5, "relative_error": 1e-3, "row_error": 2e-3}\')',
        "differs": 'print(\'{"failure": null, "num_different": 2, "num_repeats": 5, "relative_error": 1e-3, "row_error": 2e-3}\')',
        "wrong": 'print(\'{"failure": "poisoned pool: relative error nan", "num_different": 0, "num_repeats": 5}\')',
        "hangs": "import time; time.sleep(60)",
        "dies": "raise SystemExit('illegal address')",
    }
    start = subprocess.run
    fake = lambda command, **options: start([sys.executable, "-c", said[command[4]]], **options)  # noqa: E731
    monkeypatch.setattr(smoke.subprocess, "run", fake)
    monkeypatch.setattr(smoke, "VARIANTS", said)
    with pytest.raises(SystemExit) as ended:
        smoke.main(["--seconds", "2", "--output", str(tmp_path / "smoke.json")])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 1 and lines[-1] == "1 of 5 are right"
    assert lines[0].startswith("right right") and "2 of 5 repeats differ" in lines[1] and "relative error nan" in lines[2]
    assert "no answer in 2 s" in lines[3] and "exit status 1: illegal address" in lines[4]
    assert list(json.loads((tmp_path / "smoke.json").read_text())) == list(said)


def test_without_a_gpu_smoke_says_so_once(monkeypatch, capsys):
    monkeypatch.setattr(smoke, "run_in_process", lambda *_: {"failure": "exit status 1: JAX finds no GPU, only cpu: give --interpret"})
    with pytest.raises(SystemExit) as ended:
        smoke.main([])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err) == (2, "", "JAX finds no GPU, only cpu: give --interpret\n")


def test_repeats_that_differ_are_counted():
    calls = []

    def noisy(x: jax.Array) -> jax.Array:
        def noise(values: np.ndarray) -> np.ndarray:
            calls.append(1)
            return np.asarray(values) + np.float32(len(calls) % 3 == 0)

        return jax.pure_callback(noise, x, x)

    check = KernelCheck(lambda function, x: function(x), (jnp.zeros(4),), lambda: np.zeros(4))
    problem = partial(Problem, None, None, None, [], None, shape={})(checks={"one": check})
    assert smoke._num_different(noisy, problem, 6) == 2
