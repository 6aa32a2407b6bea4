"""Which layers go from which stage to which, and that they arrive."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import LayerGroups, PageSpec
from jaxinfer.kv_transfer.stage_moves import StagePageTransport, routes
from jaxinfer.programs.compilation import compile_programs
from pallas_kernels.span import FULL_ATTENTION, Span
from sharding.mesh import make_mesh
from sharding.rules import TENSOR_PARALLEL

WINDOW = Span(window=8)
MODELS = {
    "one kind": (FULL_ATTENTION,) * 6,
    "a window in five of six": tuple(FULL_ATTENTION if layer % 6 == 5 else WINDOW for layer in range(14)),
    "chunks in three of four": tuple(FULL_ATTENTION if layer % 4 == 3 else Span(chunk=4) for layer in range(8)),
}


def cuts(num_layers: int, num_stages: int) -> list[list[range]]:
    """All ways to cut layers into so many stages."""
    return [
        [range(start, stop) for start, stop in itertools.pairwise((0, *inner, num_layers))]
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_every_layer_takes_one_route_from_its_place_to_its_place(model: str) -> None:
    spans = MODELS[model]
    groups, random = LayerGroups.of(spans), np.random.default_rng(0)
    for num_source, num_target in itertools.product((1, 2, 3), repeat=2):
        of_source, of_target = cuts(len(spans), num_source), cuts(len(spans), num_target)
        source, target = of_source[random.integers(len(of_source))], of_target[random.integers(len(of_target))]
        found = routes(groups, source, target)
        moved: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for route in found:
            here, there = groups.of_stage(source[route.source]), groups.of_stage(target[route.target])
            for group, (from_places, to_places) in enumerate(zip(route.from_places, route.to_places, strict=True)):
                for from_place, to_place in zip(from_places, to_places, strict=True):
                    assert (from_place == here.size) == (to_place == there.size)  # both past the last, or neither
                    if to_place < there.size:
                        layers = [n for n in groups.layers_of(group) if n in source[route.source] and here.places[n][1] == from_place]
                        assert [there.places[n][1] for n in layers if n in target[route.target]] == [to_place]
                        moved.setdefault((layers[0], group), []).append((route.source, route.target))
        assert sorted(moved) == sorted((layer, group) for layer, (group, _) in enumerate(groups.places))
        assert all(len(ways) == 1 for ways in moved.values())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_stages_pages_have_no_place_twice_and_few_unused(model: str, num_stages: int) -> None:
    groups, num_layers = LayerGroups.of(MODELS[model]), len(MODELS[model])
    bounds = [round(number * num_layers / num_stages) for number in range(num_stages + 1)]
    for start, stop in itertools.pairwise(bounds):
        stage = groups.of_stage(range(start, stop))
        own = [stage.places[layer] for layer in range(start, stop)]
        assert len(set(own)) == len(own)
        assert all(0 <= place < stage.size for _, place in own)
        assert stage.size <= -(-groups.size // num_stages) + 1


def test_pages_arrive_in_other_cuts_and_shapes_and_no_other_page_changes() -> None:
    spans = MODELS["a window in five of six"]
    groups = LayerGroups.of(spans)
    spec = PageSpec(groups.size, 2, 16, 4, 4, groups.spans)
    random = np.random.default_rng(1)

    def pools(cut: list[range], devices: list[tuple[int, ...]]) -> list[PagePool]:
        made = [
            PagePool(spec, 9, jnp.dtype("float32"), make_mesh(ids), TENSOR_PARALLEL, num_layers=groups.of_stage(layers).size)
            for layers, ids in zip(cut, devices, strict=True)
        ]
        for pool in made:
            values = random.standard_normal(pool.abstract.shape, np.float32)
            pool.array = jax.device_put(values, pool.abstract.sharding)
        return made

    def layer_of(cut: list[range], of_pools: list[PagePool], layer: int, page: int) -> np.ndarray:
        stage = next(number for number, layers in enumerate(cut) if layer in layers)
        return np.asarray(of_pools[stage].array)[groups.of_stage(cut[stage]).places[layer][1], :, page]

    source_cut, target_cut = [range(5), range(5, 14)], [range(3), range(3, 9), range(9, 14)]
    source, target = pools(source_cut, [(0, 1), (2, 3)]), pools(target_cut, [(4,), (5,), (6,)])
    before = [np.asarray(pool.array) for pool in target]
    moves = StagePageTransport("test", routes(groups, source_cut, target_cut), source, target)
    moves.start(compile_programs(moves.programs()))
    of_groups = list(range(len(groups.spans)))[:5]
    here, there = [1, 2, 3, 4, 5], [8, 6, 7, 2, 3]
    moves.move(here, there, of_groups)
    for layer, (group, _) in enumerate(groups.places):
        for from_page, to_page, of_page in zip(here, there, of_groups, strict=True):
            if of_page == group:
                np.testing.assert_array_equal(layer_of(target_cut, target, layer, to_page), layer_of(source_cut, source, layer, from_page))
    for pool, old in zip(target, before, strict=True):
        others = [page for page in range(1, 9) if page not in there]
        np.testing.assert_array_equal(np.asarray(pool.array)[:, :, others], old[:, :, others])
