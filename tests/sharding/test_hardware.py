"""What devices can do, as it is kept and shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sharding.hardware import HARDWARE, Hardware
from sharding.targets import known_cards


def test_every_card_has_figures() -> None:
    assert set(HARDWARE) == {*known_cards(), "cpu"}


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    measured = replace(HARDWARE["cpu"], bandwidth=12.5e9, is_measured=True)
    measured.write(tmp_path / "of" / "cpu.json")
    assert Hardware.read(tmp_path / "of" / "cpu.json") == measured


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": "cpu"}'])
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.json").write_text(text)
    with pytest.raises(ValueError, match=r"cpu.json is no calibration: .*--calibrate"):
        Hardware.read(tmp_path / "cpu.json")


def test_negative_rates_are_refused(tmp_path: Path) -> None:
    replace(HARDWARE["cpu"], bandwidth=-1.0).write(tmp_path / "cpu.json")
    with pytest.raises(ValueError, match="at least 0"):
        Hardware.read(tmp_path / "cpu.json")


def test_virtual_devices_share_what_the_machine_can_do() -> None:
    cpu = HARDWARE["cpu"]
    quarter = cpu.shared_by(4)
    assert (quarter.bandwidth, quarter.rate("float32")) == (cpu.bandwidth / 4, cpu.rate("float32") / 4)
    assert quarter.kernel_seconds == cpu.kernel_seconds
    assert HARDWARE["h100"].shared_by(4) is HARDWARE["h100"]
    assert cpu.shared_by(1) is cpu


def test_a_products_time_grows_evenly_between_the_rows_that_were_measured() -> None:
    measured = replace(HARDWARE["cpu"], product_rates={"int8": {1: 2.0, 4: 4.0, 8: 8.0}})  # 0.5, 1 and 1 seconds
    rates = {rows: measured.product_rate("int8", rows) for rows in (0.5, 1, 2, 4, 6, 8, 100)}
    assert rates == pytest.approx({0.5: 2.0, 1: 2.0, 2: 2 / (0.5 + 0.5 / 3), 4: 4.0, 6: 6.0, 8: 8.0, 100: 8.0})
    assert measured.product_rate("bfloat16", 4) == measured.rate("bfloat16")


def test_what_takes_a_core_waits_for_one() -> None:
    two_cores = replace(HARDWARE["cpu"], num_cores=2, product_rates={"float32": {1: 8.0}})
    eight = two_cores.shared_by(8)
    assert eight.kernel_seconds == 4 * two_cores.kernel_seconds
    assert two_cores.shared_by(2).kernel_seconds == two_cores.kernel_seconds
    assert eight.link_seconds == 4 * two_cores.link_seconds
    assert eight.product_rates == {"float32": {1: 1.0}}
