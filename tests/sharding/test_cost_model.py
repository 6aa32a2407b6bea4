"""Costs, held against counting by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.span import Span
from sharding.cost_model import (
    AttentionWork,
    ExpertWork,
    LayerWork,
    Matrices,
    Step,
    StepCost,
    all_reduce_seconds,
    expected_max,
    move_seconds,
    part_cost,
)
from sharding.hardware import HARDWARE, Hardware

PLAIN = Hardware("plain", 1e12, {"bfloat16": 1e14, "int4": 5e13}, 1e11, 1e-5, 1e10, 1e-6, 1e-4, attention_share=0.5)
SPANS = st.sampled_from([Span()]) | st.integers(1, 9).map(lambda n: Span(window=n)) | st.integers(1, 9).map(lambda n: Span(chunk=n))


def attention(span: Span, **settings: int) -> AttentionWork:
    return AttentionWork(
        **{"token_bytes": 100, "is_split": True, "decode_values": 7, "prefill_values": 5} | settings, window=span.window, chunk=span.chunk
    )


@settings(deadline=None)
@given(SPANS, st.integers(0, 30), st.integers(1, 20))
def test_keys_are_counted_as_spans_say(span: Span, first: int, num_queries: int) -> None:
    stop = first + num_queries
    keys = [set(range(span.first(position), position + 1)) for position in range(first, stop)]
    over = attention(span)
    assert over.num_pairs(first, stop) == sum(map(len, keys))
    assert over.num_read(first, stop) == len(set().union(*keys))
    last = stop - 1
    around = range(last // span.chunk * span.chunk, (last // span.chunk + 1) * span.chunk) if span.chunk and stop > span.chunk else [last]
    expected = sum(position + 1 - span.first(position) for position in around) / len(around)
    assert over.num_keys(stop) == pytest.approx(expected)


@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), [(4, 2, 2), (4, 1, 3), (3, 2, 3)])
def test_experts_that_are_hit_are_the_mean_of_all_ways(num_experts: int, top_k: int, num_tokens: int) -> None:
    ways = list(product(combinations(range(num_experts), top_k), repeat=num_tokens))
    mean = sum(len(set().union(*way)) for way in ways) / len(ways)
    assert ExpertWork(num_experts, top_k, 1, 1).num_hit(num_tokens) == pytest.approx(mean)


def test_the_fullest_device_is_about_what_dealing_out_gives() -> None:
    random = np.random.default_rng(0)
    for num_rows, num_devices in ((256, 8), (4096, 4), (2048, 16)):
        fullest = np.mean([np.bincount(random.integers(num_devices, size=num_rows), minlength=num_devices).max() for _ in range(400)])
        mean = num_rows / num_devices
        assert expected_max(mean, math.sqrt(mean), num_devices) == pytest.approx(fullest, rel=0.1)


def test_matrices_are_read_while_they_are_multiplied() -> None:
    part = LayerWork(Matrices(split_bytes=8 * 10**9, whole_bytes=10**9, split_values=4 * 10**9, whole_values=10**8))
    one = part_cost(part, Step("decode", 1, 1, 10), 4, 1, PLAIN)
    assert one.weight_reads == pytest.approx(3e-3)
    assert one.products == pytest.approx(2 * 1.1e9 / 1e14)
    assert one.seconds == one.weight_reads
    many = part_cost(part, Step("prefill", 1, 1000, 1000), 4, 1, PLAIN)
    assert many.products == pytest.approx(2 * 1000 * 1.1e9 / 1e14) == many.seconds
    assert (one.bound, many.bound) == ("reading weights", "products with weights")


def test_keys_and_values_come_on_top() -> None:
    part = LayerWork(attention=attention(Span(), token_bytes=10**6))
    decode = part_cost(part, Step("decode", 3, 1, 1000), 2, 1, PLAIN)
    assert decode.kv_reads == pytest.approx(3 * 1000 * 1e6 / 2 / 1e12) == decode.seconds
    assert decode.attention == pytest.approx(2 * 3 * 1000 * 7 / 2 / 5e13)
    prefill = part_cost(part, Step("prefill", 1, 4, 10), 1, 1, PLAIN)
    assert prefill.attention == pytest.approx(2 * (7 + 8 + 9 + 10) * 5 / 5e13)
    assert prefill.kv_reads == pytest.approx(10 * 1e6 / 1e12)


def test_whole_latents_are_read_by_every_device_and_expanded_in_prefill() -> None:
    latent = replace(attention(Span(), expand_values=1000), is_split=False)
    step = Step("decode", 2, 1, 50)
    alone, split = (part_cost(LayerWork(attention=latent), step, tp, 1, PLAIN) for tp in (1, 4))
    assert split.kv_reads == alone.kv_reads == pytest.approx(2 * 50 * 100 / 1e12)
    assert split.attention == pytest.approx(alone.attention / 4) == pytest.approx(2 * 2 * (50 * 7 + 1000) / 4 / 5e13)
    prefill = part_cost(LayerWork(attention=latent), Step("prefill", 1, 4, 10), 1, 1, PLAIN)
    assert prefill.attention == pytest.approx(2 * (34 * 5 + 10 * 1000) / 5e13)


def test_latents_that_are_shared_out_are_read_once_and_what_is_found_is_exchanged() -> None:
    latent = attention(Span(), expand_values=1000, exchanged_bytes=3000)
    step = Step("decode", 2, 1, 50)
    alone, split = (part_cost(LayerWork(attention=latent), step, tp, 1, PLAIN) for tp in (1, 4))
    assert alone.collectives == 0
    assert split.kv_reads == pytest.approx(alone.kv_reads / 4)
    assert split.collectives == pytest.approx(2e-5 + 2 * 3000 * 0.75 / 1e11)
    prefill = part_cost(LayerWork(attention=latent), Step("prefill", 2, 1000, 5000), 4, 1, PLAIN)
    assert prefill.collectives == pytest.approx(3 * 1e-5 + 2 * 5000 * 100 * 0.75 / 1e11)


def test_the_head_sees_sampled_tokens_and_the_embedding_rows() -> None:
    step = Step("prefill", 2, 100, 100)
    head = LayerWork(Matrices(split_values=10**6), reduced_bytes=(8,), of_sampled=True)
    assert part_cost(head, step, 1, 1, PLAIN).products == pytest.approx(2 * 2 * 1e6 / 1e14)
    assert part_cost(head, step, 2, 1, PLAIN).collectives == pytest.approx(1e-5 + 16 / 1e11)
    assert part_cost(LayerWork(Matrices(row_bytes=1000)), step, 1, 1, PLAIN).weight_reads == pytest.approx(200 * 1000 / 1e12)


def test_all_reduces_pass_each_link_nearly_twice() -> None:
    assert all_reduce_seconds(10**9, 1, PLAIN) == 0
    assert all_reduce_seconds(10**9, 4, PLAIN) == pytest.approx(1e-5 + 1.5 * 1e-2)
    assert move_seconds(10**9, PLAIN) == pytest.approx(1e-5 + 1e-2)
    part = LayerWork(reduced_bytes=(100, 50))
    assert part_cost(part, Step("prefill", 1, 1000, 1000), 2, 1, PLAIN).collectives == pytest.approx(2e-5 + 150_000 / 1e11)


def test_whole_experts_wait_for_the_fullest_device() -> None:
    experts = ExpertWork(64, 4, 10**8, 5 * 10**7, "int4")
    step = Step("decode", 16, 1, 100)
    split, whole = (part_cost(LayerWork(experts=experts), step, 8, ep, PLAIN) for ep in (1, 8))
    hit = 64 * (1 - (15 / 16) ** 16)
    assert split.weight_reads == pytest.approx(hit * 1e8 / 8 / 1e12)
    assert split.products == pytest.approx(2 * 16 * 4 * 5e7 / 8 / 5e13)
    assert split.weight_reads < whole.weight_reads <= 8 * 1e8 / 1e12
    assert split.products < whole.products
    every = part_cost(LayerWork(experts=experts), Step("prefill", 1, 4096, 4096), 8, 8, PLAIN)
    assert every.weight_reads == pytest.approx(8 * 1e8 / 1e12, rel=1e-3), "all of a device's, and never more"


def test_what_whole_experts_give_comes_together_the_quicker_way() -> None:
    """Of top-1 routing each token has one part to send home; of an all-reduce every device has one, zeros most of them."""
    top_1, step = ExpertWork(16, 1, 100, 100), Step("prefill", 1, 4096, 4096)
    part = LayerWork(experts=top_1, reduced_bytes=(8192, 8192))
    both = 2 * all_reduce_seconds(4096 * 8192, 8, PLAIN)
    assert part_cost(part, step, 8, 1, PLAIN).collectives == both
    sent = 7 * 512 * 8192 * (1 / 8 + 1) / 1e11 + 2e-5
    assert part_cost(part, step, 8, 8, PLAIN).collectives == pytest.approx(both / 2 + sent)
    assert sent < both / 2
    shared = replace(part, experts=replace(top_1, has_shared=True))
    assert part_cost(shared, step, 8, 8, PLAIN).collectives == both
    few = Step("decode", 1, 1, 100)
    assert part_cost(part, few, 8, 8, PLAIN).collectives == pytest.approx(2 * all_reduce_seconds(8192, 8, PLAIN)), "one launch, not two"


def test_costs_add_up_by_what_they_are_of() -> None:
    parts, step = [LayerWork(num_kernels=3), LayerWork(Matrices(split_bytes=10**9))], Step("decode", 1, 1, 1)
    starting, reading = (part_cost(part, step, 1, 1, PLAIN) for part in parts)
    assert (starting.seconds, starting.starts) == (3e-6, 3e-6)
    assert (starting + reading).seconds == pytest.approx(3e-6 + 1e-3)
    assert StepCost(1, 2, 3, 4, 5, 6, 7) + StepCost(1, 1, 1, 1, 1, 1, 1) == StepCost(2, 3, 4, 5, 6, 7, 8)
    assert {StepCost(kv_reads=1).bound, StepCost(attention=1).bound, StepCost(collectives=1).bound} == {
        "reading KV",
        "attention's products",
        "collectives",
    }


def test_an_h200_reads_faster_and_multiplies_no_faster() -> None:
    h100, h200 = HARDWARE["h100"], HARDWARE["h200"]
    assert h200.bandwidth / h100.bandwidth == pytest.approx(4.8 / 3.35)
    assert h200.matmul_rates == h100.matmul_rates
    assert h100.rate("bfloat16") < 989e12
    assert h100.rate("of no kind") == h100.rate("float32")


def test_split_tokens_save_what_lies_between_sums_and_cost_a_launch_for_each_in_prefill() -> None:
    hardware = replace(PLAIN, activation_bandwidth=1e9)
    part = LayerWork(
        attention=AttentionWork(1, True, 1, 1), reduced_bytes=(100, 100), whole_moved=1000
    )  # five times a sum's bytes between two
    many = Step("prefill", 1, 1000, 1000)  # 1 ms of what lies between sums, three quarters of which is saved; a launch is 10 us
    split = part_cost(part, many, 4, 1, hardware)
    assert split.activations == pytest.approx(1e-3 / 4)
    assert split.collectives == pytest.approx(2 * (all_reduce_seconds(100_000, 4, hardware) + 1e-5))
    for whole in (replace(hardware, adds_in_link=True), replace(hardware, link_seconds=1.0)):
        assert part_cost(part, many, 4, 1, whole).activations == pytest.approx(1e-3)
    decode = Step("decode", 1000, 1, 1000)
    assert part_cost(part, decode, 4, 1, hardware).activations == pytest.approx(1e-3)
