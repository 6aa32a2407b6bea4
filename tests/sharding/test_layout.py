"""Layouts, as they are written and dealt out."""

from __future__ import annotations

import pytest

from jaxinfer.config import EngineConfig
from sharding.layout import Parallel


@pytest.mark.parametrize(
    ("text", "layout", "written"),
    [
        ("tp=2", Parallel(tp=2), "tp=2"),
        ("pp=4", Parallel(pp=4), "tp=1,pp=4"),
        (" tp = 2 , pp=2", Parallel(tp=2, pp=2), "tp=2,pp=2"),
        ("ep=8,tp=8", Parallel(tp=8, ep=8), "tp=8,ep=8"),
        ("tp=1,pp=1,ep=1", Parallel(), "tp=1"),
    ],
)
def test_what_is_written_is_read_and_written_again(text: str, layout: Parallel, written: str) -> None:
    assert Parallel.parse(text) == layout
    assert str(layout) == written
    assert Parallel.parse(written) == layout


def test_devices_are_stages_in_turn() -> None:
    assert Parallel(tp=2, pp=3).stages((4, 5, 6, 7, 0, 1)) == [(4, 5), (6, 7), (0, 1)]


@pytest.mark.parametrize(
    ("given", "devices", "layouts"),
    [
        ({}, ((0,), (0,)), ("tp=1", "tp=1")),
        ({"prefill_devices": (0, 1)}, ((0, 1), (0, 1)), ("tp=2", "tp=2")),
        ({"decode_devices": (1,)}, ((0,), (1,)), ("tp=1", "tp=1")),
        ({"prefill_devices": (0, 1), "decode_devices": (2,)}, ((0, 1), (2,)), ("tp=2", "tp=1")),
        ({"prefill_parallel": "tp=2,pp=2"}, ((0, 1, 2, 3), (0, 1, 2, 3)), ("tp=2,pp=2", "tp=2,pp=2")),
        ({"decode_parallel": "tp=2"}, ((0, 1), (0, 1)), ("tp=2", "tp=2")),
        ({"prefill_parallel": "tp=2,pp=2", "decode_parallel": "tp=4"}, ((0, 1, 2, 3), (4, 5, 6, 7)), ("tp=2,pp=2", "tp=4")),
        ({"prefill_parallel": "pp=2", "decode_devices": (5, 3)}, ((0, 1), (5, 3)), ("tp=1,pp=2", "tp=1,pp=2")),
        ({"prefill_parallel": "pp=2", "decode_devices": (5, 3, 4)}, ((0, 1), (5, 3, 4)), ("tp=1,pp=2", "tp=3")),
        ({"prefill_devices": (6, 7), "decode_parallel": "tp=1"}, ((6, 7), (8,)), ("tp=2", "tp=1")),
    ],
    ids=str,
)
def test_what_is_not_given_of_devices_and_layouts_follows(
    given: dict[str, object], devices: tuple[tuple[int, ...], ...], layouts: tuple[str, str]
) -> None:
    found = EngineConfig.of(**given).devices
    assert (found.prefill_devices, found.decode_devices) == devices
    assert (found.prefill_parallel, found.decode_parallel) == layouts
