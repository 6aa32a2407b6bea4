"""Heads on any number of devices: the cheapest layout, against trying all; and where each head's weights come from."""

from __future__ import annotations

from itertools import product

import pytest

from jaxinfer.architecture.head_layout import HeadLayout

SIZES = [(kv * group, kv, n) for kv, group, n in product(range(1, 13), (1, 2, 3, 4, 5, 7, 8, 16), (1, 2, 3, 4, 5, 6, 8, 16))]


@pytest.mark.parametrize(
    ("heads", "on_mesh", "copies"),
    [
        ((9, 3, 1), (9, 3), 1),
        ((9, 3, 2), (12, 4), 1),  # SmolLM2
        ((9, 3, 3), (9, 3), 1),
        ((9, 3, 4), (12, 4), 1),
        ((9, 3, 8), (16, 8), 2),
        ((64, 4, 4), (64, 4), 1),  # Qwen3-235B-A22B
        ((64, 4, 8), (64, 8), 2),
        ((40, 8, 16), (48, 16), 2),  # Llama 4 Scout: five query heads to a KV head
        ((16, 1, 8), (16, 8), 8),
        ((64, 64, 8), (64, 64), 1),
        ((64, 64, 6), (66, 66), 1),
    ],
)
def test_known_models_on_so_many_devices(heads, on_mesh, copies):
    layout = HeadLayout.of(*heads)
    assert (layout.num_heads, layout.num_kv_heads, layout.copies) == (*on_mesh, copies)


def test_no_number_of_copies_costs_a_device_less():
    for num_heads, num_kv_heads, num_devices in SIZES:
        layout, group = HeadLayout.of(num_heads, num_kv_heads, num_devices), num_heads // num_kv_heads

        def cost(copies):
            kv_heads = -(-num_kv_heads * copies // num_devices)  # noqa: B023
            return kv_heads, kv_heads * -(-group // copies), copies  # noqa: B023

        best = min(cost(copies) for copies in range(1, 2 * group + num_devices))
        assert (layout.num_kv_heads // num_devices, layout.num_heads // num_devices, layout.copies) == best


def test_devices_that_divide_the_kv_heads_have_the_models_own():
    for num_heads, num_kv_heads, num_devices in SIZES:
        layout = HeadLayout.of(num_heads, num_kv_heads, num_devices)
        assert layout.is_models == (num_kv_heads % num_devices == 0)
        changed = {"kv_heads"} | ({"heads"} if layout.num_heads > num_heads else set())
        assert layout.spread_axes == (set() if layout.is_models else changed)
        if layout.is_models:
            assert (layout.num_heads, layout.num_kv_heads) == (num_heads, num_kv_heads)
            assert layout.query_heads == tuple(range(num_heads))
            assert layout.kv_heads == tuple(range(num_kv_heads))
            assert layout.projections == tuple(range(num_heads + 2 * num_kv_heads))


def test_every_query_head_is_there_once_beside_a_copy_of_its_kv_head():
    for num_heads, num_kv_heads, num_devices in SIZES:
        layout, group = HeadLayout.of(num_heads, num_kv_heads, num_devices), num_heads // num_kv_heads
        assert len(layout.query_heads) == layout.num_heads and len(layout.kv_heads) == layout.num_kv_heads
        assert layout.num_kv_heads % num_devices == 0
        assert [head for head in layout.query_heads if head is not None] == list(range(num_heads))
        assert [layout.kv_heads.count(head) for head in range(num_kv_heads)] == [layout.copies] * num_kv_heads
        for place, head in enumerate(layout.query_heads):
            assert head is None or layout.kv_heads[place // layout.group] == head // group
        # As one would write the projections out: of each KV head its query heads, its key, its value.
        rows = [(k, part) for k in range(num_kv_heads) for part in (*range(k * group, (k + 1) * group), "key", "value")]
        on_mesh = [
            (k, part)
            for place, k in enumerate(layout.kv_heads)
            for part in (*layout.query_heads[place * layout.group : (place + 1) * layout.group], "key", "value")
        ]
        expected = [None if k is None or part is None else rows.index((k, part)) for k, part in on_mesh]
        assert list(layout.projections) == expected


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ((9, 3, 2), "KV heads 3 -> 4 over 2 devices: 33% more KV, 33% more attention weights"),
        ((9, 3, 8), "KV heads 3 -> 8, 2 copies of each, over 8 devices: 167% more KV, 100% more attention weights"),
        ((64, 4, 8), "KV heads 4 -> 8, 2 copies of each, over 8 devices: 100% more KV, 6% more attention weights"),
    ],
)
def test_it_says_what_it_costs(heads, said):
    assert HeadLayout.of(*heads).cost() == said


def test_where_a_page_has_no_heads_only_weights_cost_more():
    assert HeadLayout.of(64, 64, 6).cost(has_latents=True) == "heads 64 -> 66 over 6 devices: 3% more weights of heads"
