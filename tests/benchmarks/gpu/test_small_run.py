"""The whole of it on a CPU, in tiny sizes."""

import base64
import gzip
import json
import subprocess
import sys

import pytest

from benchmarks.gpu.__main__ import _select, _unused, main
from benchmarks.gpu.catalog import catalog
from benchmarks.gpu.kernels import implementation
from benchmarks.gpu.sizes import FULL
from benchmarks.gpu.stand_ins import NOT_NEEDED


@pytest.mark.exhaustive  # a minute; each measure has tests of its own
def test_a_small_run_writes_rows_with_shares_and_prints_a_table(tmp_path, capsys):
    path = tmp_path / "small.json"
    wanted = [
        "copy/*",
        "matmul/*",
        "paged_attention/xla/batch*",
        "paged_attention/torch sdpa/*",
        "write_and_attend/xla/*",
        "decode step/xla",
    ]
    main(["--small", "--output", str(path), "--seed", "3", "--only", *wanted])
    written = json.loads(path.read_text())
    assert written["about"]["card"] == "cpu" and written["settings"]["seed"] == 3
    ours = [row for row in written["rows"] if row["way"] == "xla" and row["name"] != "matmul"]
    assert len(ours) == 7, "two sizes of attention, with a write and without, one short context, and two of a step"
    # A busy machine may leave too little of the shortest to measure.
    assert all(row["failure"] is None or "too short" in row["failure"] for row in ours)
    steps = [row for row in ours if row["name"] == "decode step"]
    assert all(row["notes"]["tokens"] and row["times"]["median"] > 0 for row in steps)
    # What each of them is to XLA, compressed: the text begins with its module's name.
    programs = [row["notes"]["program"] for row in ours if "program" in row["notes"]]
    programs += [steps[0]["notes"]["programs"][f"decode/{batch}"] for batch in (1, 4)]
    assert len(programs) >= 3
    for program in programs:
        assert gzip.decompress(base64.b64decode(program["hlo"])).startswith(b"HloModule")
        assert sum(sum(kinds.values()) for kinds in program["launches"].values()) > 0
    theirs = [row for row in written["rows"] if row["way"] == "torch sdpa"]
    assert len(theirs) == 2
    shown = capsys.readouterr().out
    assert "decode step" in shown.partition("\n")[2] and str(path) in shown


def test_without_a_gpu_the_full_sizes_are_refused_in_words(tmp_path, capsys):
    path = tmp_path / "full.json"
    main(["--output", str(path), "--only", "copy/*", "paged_attention/mosaic_gpu/*"])
    shown = capsys.readouterr().out
    assert "JAX finds no GPU, only cpu" in shown and "--small" in shown
    assert all(row["times"] is None for row in json.loads(path.read_text())["rows"])


def test_keys_are_one_of_a_kind_and_the_card_comes_first():
    for is_tuning in (False, True):
        keys = [measure.key for measure in catalog(is_small=False, seed=0, is_tuning=is_tuning)]
        assert len(set(keys)) == len(keys)
        assert [key.split("/")[0] for key in keys[:3]] == ["copy", "copy", "matmul"]
        assert keys[3].startswith("paged_attention/mosaic_gpu/")


def test_a_write_is_measured_both_ways():
    measured, tuned = (catalog(is_small=False, seed=0, is_tuning=is_tuning) for is_tuning in (False, True))
    ways = [m.way for m in measured if m.name == "write_and_attend" and m.case == "batch 1, context 512"]
    assert ways == ["mosaic_gpu, separate", "mosaic_gpu, one launch", "xla"]
    tried = [m.run.args[-1]["writes"] for m in tuned if m.key.startswith("write_and_attend/mosaic_gpu/batch 128, ")]
    assert 2 * sum(tried) == len(tried) > 4


def test_to_list_what_there_is_takes_no_device():
    """The process that starts the others, and torch's, would take the card's memory from them."""
    listed = """
from benchmarks.gpu import __main__
from benchmarks.gpu.catalog import catalog
from jax._src import xla_bridge
assert [len(catalog(is_small=False, seed=0, is_tuning=is_tuning)) > 50 for is_tuning in (False, True)] == [True, True]
print(xla_bridge.backends_are_initialized())
"""
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("paged_attention", 20),
        ("ragged_prefill_attention", 20),
        ("latent_prefill_attention", 6),
        ("grouped_matmul", 20),
        ("write_and_attend", 20),
    ],
)
def test_tilings_to_try_are_tilings_of_the_kernels(name, least):
    of_kernel = [m for m in catalog(is_small=False, seed=0, is_tuning=True) if m.name == name]
    assert len(of_kernel) >= least
    for measure in of_kernel:
        tiling = measure.run.args[-1]
        assert implementation(name, "mosaic_gpu", tiling).keywords["tiling"].__dict__.items() >= tiling.items()


def test_kernels_and_engine_need_no_packages_for_checkpoints_texts_and_cpus():
    """As on a borrowed machine: their import fails, and what stands in for them says so once it is called."""
    hidden = f"""
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in {NOT_NEEDED!r} else find(name, *rest)
from benchmarks.gpu.kernels import implementation
for name in ("paged_attention", "ragged_prefill_attention", "latent_prefill_attention", "grouped_matmul"):
    implementation(name, "xla", None)
from benchmarks.gpu import engine
import safetensors
print(safetensors.__file__ if hasattr(safetensors, "__file__") else "no file")
try:
    safetensors.safe_open("x", framework="np")
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["no file", "safetensors is not installed on this machine"], done.stderr


def test_a_second_run_of_a_day_has_a_file_of_its_own(tmp_path):
    first = _unused(tmp_path / "card-2026-11-20.json")
    assert first.name == "card-2026-11-20.json"
    first.touch()
    second = _unused(first)
    second.touch()
    assert (second.name, _unused(first).name) == ("card-2026-11-20-2.json", "card-2026-11-20-3.json")


def test_a_pattern_that_names_nothing_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["--small", "--only", "pagd*"])
    assert "pagd*" in capsys.readouterr().err


def test_measures_come_by_value_or_as_they_are_asked_for():
    measures = catalog(is_small=True, seed=0, is_tuning=False)
    patterns = ["prefill step/xla", "copy/*", "*step/xla"]
    by_value, given = ([m.key for m in _select(measures, patterns, order)] for order in ("value", "given"))
    assert [key.split("/")[0] for key in by_value] == ["copy", "copy", "decode step", "prefill step"]
    assert [key.split("/")[0] for key in given] == ["prefill step", "copy", "copy", "decode step"]


def test_predictions_need_no_gpu(capsys):
    main(["--predict"])
    assert f"{FULL.matrix_size} x {FULL.matrix_size}" in capsys.readouterr().out
