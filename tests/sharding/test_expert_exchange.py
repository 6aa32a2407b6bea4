"""The cost of bringing experts' results together, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from sharding.expert_exchange import ExchangeCost, Link, MoELayerWork, choose, exchange_cost, link_for, replicated_cost
from sharding.hardware import HARDWARE

# bfloat16, on eight cards.
LLAMA_4 = MoELayerWork(4096, 5120, 2, num_experts=16, top_k=1, num_devices=8, has_shared=True)
KIMI = MoELayerWork(4096, 7168, 2, num_experts=384, top_k=8, num_devices=8, has_shared=True)
QWEN_3 = MoELayerWork(4096, 4096, 2, num_experts=128, top_k=8, num_devices=8)
NVLINK = Link(450e9, 1e-5)
DENSE = Link(450e9, 1e-5, is_ragged=False)
FREE = Link(1.0, 0.0)  # bytes alone count


@pytest.mark.parametrize(("num_experts", "top_k", "num_devices"), [(8, 1, 4), (8, 3, 2), (8, 3, 4), (6, 5, 3), (4, 4, 2)])
def test_devices_of_a_token_are_counted_over_all_its_choices(num_experts: int, top_k: int, num_devices: int) -> None:
    found = [len({expert * num_devices // num_experts for expert in chosen}) for chosen in combinations(range(num_experts), top_k)]
    mixture = MoELayerWork(1, 1, 1, num_experts, top_k, num_devices)
    assert mixture.devices_of_token == pytest.approx(sum(found) / len(found))


def test_an_all_reduce_sends_everything_nearly_twice() -> None:
    assert replicated_cost(KIMI) == ExchangeCost(2 * 7 * 512 * 7168 * 2, 1)  # each eighth of the tokens is 512


def test_an_all_to_all_sends_what_is_there_and_the_sums() -> None:
    top_1 = replace(LLAMA_4, has_shared=False)
    # Of a token one part, on one of eight devices: 512 a device, seven eighths of them for others; then its share's sums to seven others.
    assert exchange_cost(top_1, NVLINK) == ExchangeCost((512 * 7 / 8 + 512 * 7) * 5120 * 2, 2)
    everywhere = replace(QWEN_3, top_k=128)
    assert exchange_cost(everywhere, NVLINK).num_bytes == replicated_cost(everywhere).num_bytes, "never more than an all-reduce"
    assert exchange_cost(QWEN_3, DENSE).num_bytes == replicated_cost(QWEN_3).num_bytes, "what could be there, where it can't be ragged"


def test_tokens_that_devices_do_not_divide_are_sent_in_shares_of_as_many() -> None:
    assert exchange_cost(replace(QWEN_3, num_tokens=9), FREE) == exchange_cost(replace(QWEN_3, num_tokens=16), FREE)


def test_the_crossover_is_where_the_bytes_saved_take_a_launch() -> None:
    share = QWEN_3.devices_of_token / 8
    assert share == pytest.approx(0.667, abs=1e-3)  # a device has a part of two tokens in three
    saved = (1 - share) * 7 / 8 * 4096 * 2  # bytes a token
    crossover = NVLINK.launch_seconds * NVLINK.bytes_per_second / saved
    assert 1000 < crossover < 3000
    ways = {num_tokens: choose(replace(QWEN_3, num_tokens=num_tokens), NVLINK)[0] for num_tokens in (1, 32, 1024, 2048, 8192)}
    below, above = int(crossover) // 8 * 8, int(crossover) // 8 * 8 + 8
    assert choose(replace(QWEN_3, num_tokens=below), NVLINK)[0] == "replicate"
    assert choose(replace(QWEN_3, num_tokens=above), NVLINK)[0] == "all_to_all"
    assert ways == {1: "replicate", 32: "replicate", 1024: "replicate", 2048: "all_to_all", 8192: "all_to_all"}


@pytest.mark.parametrize("mixture", [LLAMA_4, KIMI], ids=["llama 4", "kimi"])
@pytest.mark.parametrize("num_tokens", [1, 64, 2048, 10**6])
def test_a_shared_expert_leaves_nothing_to_save(mixture: MoELayerWork, num_tokens: int) -> None:
    mixture = replace(mixture, num_tokens=num_tokens)
    exchange, why = choose(mixture, NVLINK)
    assert exchange == "replicate" and "shared expert" in why
    assert exchange_cost(mixture, FREE).seconds(FREE) >= replicated_cost(mixture).seconds(FREE)


def test_without_it_fewer_tokens_are_worth_an_all_to_all_the_fewer_devices_have_a_part() -> None:
    def first(mixture: MoELayerWork) -> int:
        sizes = range(8, 10**4, 8)
        return next(n for n in sizes if choose(replace(mixture, num_tokens=n, has_shared=False), NVLINK)[0] == "all_to_all")

    # A launch is worth 10 us of 450 GB/s, 4.5 MB. Of a token 7 / 8 of its bytes are saved for each device, of others, without a part of it.
    assert first(LLAMA_4) == 576  # 4.5 MB / (7 / 8 x 7 / 8 x 10,240)
    assert first(KIMI) == 1056  # 4.5 MB / (0.34 x 7 / 8 x 14,336)


def test_the_choice_says_what_both_would_take() -> None:
    assert choose(QWEN_3, NVLINK)[1] == "replicate 140.5 us for 56.00 MiB a device in 1, all_to_all 128.8 us for 46.69 MiB a device in 2"


def test_links_of_devices() -> None:
    for kind, card in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("Some other", "h100")):
        assert link_for(kind) == Link(HARDWARE[card].link_bandwidth, HARDWARE[card].link_seconds, is_ragged=True)
    assert not link_for("cpu").is_ragged
    assert choose(replace(QWEN_3, num_tokens=10**6), link_for("cpu"))[0] == "replicate"
