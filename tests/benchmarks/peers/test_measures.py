from __future__ import annotations

import json

import pytest

from benchmarks.peers.measures import EngineFigure, Measures, Spread
from benchmarks.peers.rates import rotate


def rate(**values: list[float | None]) -> EngineFigure:
    return EngineFigure("decode", "decode, batch 8", "tokens/s", True, values)


def test_a_ratio_is_the_median_of_ratios_of_one_round() -> None:
    measure = rate(ours=[100, 300, 200], peer=[100, 200, 400])
    # 1, 1.5 and 0.5; the ratio of the medians would be 1 too, so a fourth round tells them apart.
    assert measure.ratio("ours", "peer") == Spread(1.0, 0.5, 1.5)
    measure.add("ours", 900)
    measure.add("peer", 300)
    assert measure.ratio("ours", "peer") == Spread(1.25, 0.5, 3.0)


def test_where_less_is_better_the_ratio_is_turned_over() -> None:
    waits = EngineFigure("start", "warm start", "s", False, {"ours": [2.0, 4.0], "peer": [8.0, 4.0]})
    assert waits.ratio("ours", "peer") == Spread(2.5, 1.0, 4.0)
    assert waits.best(["ours", "peer"]) == "ours"


def test_a_round_that_one_of_two_missed_gives_no_ratio() -> None:
    measure = rate(ours=[100, None, 300], peer=[50, 10])
    assert measure.ratio("ours", "peer") == Spread(2.0, 2.0, 2.0)
    assert measure.spread("ours") == Spread(200, 100, 300)
    assert measure.ratio("ours", "nobody") is None
    assert rate(ours=[None]).spread("ours") is None


def test_the_best_is_the_one_of_the_best_median() -> None:
    measure = rate(steady=[100, 100, 100], lucky=[10, 20, 900], gone=[None, None, None])
    assert measure.best(["steady", "lucky", "gone"]) == "steady"
    assert measure.best(["gone"]) is None
    assert measure.best(["lucky"]) == "lucky"


def test_measures_survive_json_in_their_order() -> None:
    measures = Measures()
    for value in (1.0, 2.0):
        measures.add("decode", "batch 8", "tokens/s", "a", value, is_higher_better=True)
    measures.add("start", "cold", "s", "a", None, is_higher_better=False)
    back = Measures.from_json(json.loads(json.dumps(measures.as_json())))
    assert [m.label for m in back.found.values()] == ["batch 8", "cold"]
    assert back.of("decode")[0].spread("a") == Spread(1.5, 1.0, 2.0)
    assert not back.of("start")[0].is_higher_better


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_engine_is_first_equally_often(count: int) -> None:
    names = [f"engine {i}" for i in range(count)]
    rounds = [rotate(names, number) for number in range(2 * count)]
    assert all(sorted(order) == names for order in rounds)
    assert sorted(order[0] for order in rounds) == sorted(names * 2)
