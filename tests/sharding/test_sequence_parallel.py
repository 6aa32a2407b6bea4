"""When a reduce-scatter with an all-gather is taken for an all-reduce, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sharding.hardware import HARDWARE
from sharding.sequence_parallel import is_cheaper, splits_tokens

PLAIN = replace(HARDWARE["cpu"], bandwidth=1e9, activation_bandwidth=4e9, link_seconds=1e-3, shares_machine=False)


def test_what_lies_between_sums_has_to_be_worth_three_launches() -> None:
    # Three quarters of five moves are saved on four devices: 3 ms of 1 GB/s.
    enough = 3e-3 * 1e9 / (3 / 4) / 5
    assert not is_cheaper(enough * 0.99, 4, PLAIN)
    assert is_cheaper(enough * 1.01, 4, PLAIN)
    assert not is_cheaper(enough * 1.01, 2, PLAIN), "of two only half is saved"
    assert not is_cheaper(1e12, 1, PLAIN), "there is nobody to share with"


def test_a_cache_may_be_slower_than_memory_but_not_quicker() -> None:
    measured = replace(PLAIN, activation_bandwidth=0.5e9)
    assert is_cheaper(0.5e6, 4, measured) and not is_cheaper(0.5e6, 4, PLAIN)


def test_a_switch_that_adds_up_is_never_beaten() -> None:
    assert not is_cheaper(1e12, 8, replace(PLAIN, adds_in_link=True))
    for card in ("h100", "h200"):
        assert not splits_tokens("auto", 8192, 16384, 8, HARDWARE[card])
        assert splits_tokens("on", 8192, 16384, 8, HARDWARE[card]), "who has measured knows better"


@pytest.mark.parametrize(("num_tokens", "expected"), [(64, False), (256, False), (512, True), (511, False)])
def test_auto_takes_prefills_of_many_tokens_that_devices_divide(num_tokens: int, expected: bool) -> None:
    assert splits_tokens("auto", num_tokens, 2304, 8, HARDWARE["cpu"]) is expected
    assert splits_tokens("off", num_tokens, 2304, 8, HARDWARE["cpu"]) is False
    assert splits_tokens("on", num_tokens, 2304, 8, HARDWARE["cpu"]) is (num_tokens % 8 == 0)
    assert splits_tokens("on", num_tokens, 2304, 1, HARDWARE["cpu"]) is False


def test_on_two_virtual_devices_the_copy_takes_what_is_saved() -> None:
    assert not any(splits_tokens("auto", num_tokens, 2304, 2, HARDWARE["cpu"]) for num_tokens in (128, 512, 2048, 8192))
