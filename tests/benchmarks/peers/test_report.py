from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from benchmarks.peers import charts, report
from benchmarks.peers.measures import Measures, Spread

BITS = {"jaxinfer float32": 32, "jaxinfer bfloat16": 16, "transformers bfloat16": 16, "llama.cpp Q4_1": 4}


def result(**changes: Any) -> dict[str, Any]:
    measures = Measures()
    for name, rates in zip(BITS, ([100, 200, 150], [300, 330, 280], [200, 300, 200], [900, 900, 900]), strict=True):
        for rate in rates:
            measures.add("decode", "decode, batch 8", "tokens/s", name, rate, is_higher_better=True)
    for name, seconds in (("jaxinfer bfloat16", 6.0), ("transformers bfloat16", 12.0)):
        measures.add("start", "warm start to first token", "s", name, seconds, is_higher_better=False)
    for name, seconds in (("with the prefix cache", 0.05), ("without it", 1.0)):
        measures.add("second turn", "2,000 tokens", "s", name, seconds, is_higher_better=False)
    measures.add("quality", "KL divergence to jaxinfer float32", "nats", "llama.cpp Q4_1", 0.0038, is_higher_better=False)
    return {
        "date": "2026-11-20",
        "machine": {"cpu": "A CPU", "cores": 2},
        "seconds": 120,
        "settings": {"model": "default", "rounds": 3},
        "engines": {name: {"bits": bits, "versions": {"library": "1.2"}, "settings": {}} for name, bits in BITS.items()},
        "absent": {"vLLM bfloat16": ".venv-vllm can't be made here: ERROR: no such package"},
        "lost": {},
        "others": {"median": 0.01, "most": 0.2, "samples": []},
        "measures": measures.as_json(),
        **changes,
    }


def row(page: str, begins: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(f"| {begins}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_are_to_the_best_peer_that_holds_weights_in_16_or_32_bits() -> None:
    cells = row(report.render(result()), "decode, batch 8")
    assert cells[1:5] == ["150", "300", "200", "900"]
    assert cells[5] == "transformers bfloat16"  # not the quicker one of 4 bits
    assert cells[6:] == ["0.67 (0.50-0.75)", "**1.40** (1.10-1.50)"]


def test_few_bits_are_held_against_few_bits_too() -> None:
    few = result()
    few["engines"]["jaxinfer int8"] = {"bits": 8}
    few["measures"][0]["values"]["jaxinfer int8"] = [450, 600, 450]
    page = report.render(few)
    assert row(page, "decode, batch 8")[-2:] == ["**2.25** (2.00-2.25)", "0.50 (0.50-0.67)"]
    assert "| jaxinfer int8 / best peer | jaxinfer int8 / llama.cpp Q4_1 |" in page


def test_a_shorter_time_is_a_ratio_above_one_and_what_is_missing_is_a_dash() -> None:
    cells = row(report.render(result()), "warm start")
    assert cells[1:] == ["6.00 s", "12 s", "transformers bfloat16", "**2.00** (2.00-2.00)"]
    assert row(report.render(result()), "2,000 tokens")[1:] == ["50.0 ms", "1.00 s", "**20.00** (20.00-20.00)"]


def test_absent_and_failed_engines_are_named_with_the_reason() -> None:
    page = report.render(result(lost={"llama.cpp Q4_1, served": "1 client: broken"}))
    assert "* **vLLM bfloat16**: .venv-vllm can't be made here: ERROR: no such package" in page
    assert "* **llama.cpp Q4_1, served**: failed during the run: 1 client: broken" in page
    assert "## Not measured" not in report.render(result(absent={}))


def test_without_peers_there_are_no_ratios() -> None:
    ours = result()
    ours["engines"] = {"jaxinfer float32": ours["engines"]["jaxinfer float32"]}
    assert row(report.render(ours), "decode, batch 8") == ["decode, batch 8", "150"]


def test_a_run_beside_other_work_is_said_to_be_worth_nothing() -> None:
    assert "Not a quiet machine" not in report.render(result())
    assert "kept 0.80 cores busy" in report.render(result(others={"median": 0.8, "most": 1.5, "samples": []}))
    assert "Not a quiet machine" not in report.render(result(others=None))


def test_versions_settings_and_what_else_ran_are_told() -> None:
    page = report.render(result(), ["run-rates.png"])
    for words in (
        "* llama.cpp Q4_1: library 1.2",
        "rounds 3",
        "median 0.01 of 2 cores, at most 0.20",
        "A CPU, 2 cores",
        "![run-rates.png]",
    ):
        assert words in page


@pytest.mark.parametrize(
    ("unit", "number", "shown"),
    [
        ("tokens/s", 1234.5, "1,234"),
        ("tokens/s", 57.74, "57.7"),
        ("s", 0.0123, "12.3 ms"),
        ("s", 0.5, "500 ms"),
        ("s", 6.06, "6.06 s"),
        ("s", 65.2, "65 s"),
        ("MiB", 1427.2, "1,427 MiB"),
        ("share", 0.043, "4.3%"),
        ("nats", 0.00381, "0.0038"),
        ("", 34.81, "34.8"),
    ],
)
def test_figures_are_shown_as_people_read_them(unit: str, number: float, shown: str) -> None:
    assert report.value(unit, Spread(number, number, number)) == shown


def test_each_engine_has_a_color_of_its_own() -> None:
    found = charts.colors([*BITS, "vLLM bfloat16", "jaxinfer int8"])
    assert len({tuple(round(c, 3) for c in color) for color in found.values()}) == 6


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    pictures = charts.draw(tmp_path, "run", "A CPU, 2 cores", Measures.from_json(result()["measures"]), list(BITS))
    assert [path.name for path in pictures] == ["run-rates.png", "run-start.png"]
    for path in pictures:
        height, width, _ = matplotlib.image.imread(path).shape
        assert width > 400 and height > 200
