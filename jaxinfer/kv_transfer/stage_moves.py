"""Transport of pages between roles with different pipeline stages: each stage sends the part of its layers to each
stage that has any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxinfer.architecture.head_layout import HeadLayout
from jaxinfer.kv_cache.pages import PagePool, Pages
from jaxinfer.kv_cache.spec import LayerGroups
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, Gathered, padded, to_model_heads, to_pool_heads
from jaxinfer.programs.buckets import bucket_for
from jaxinfer.programs.compilation import Executable, ProgramSource
from sharding.partition import move, replicated


@dataclass(frozen=True)
class Route:
    """From a stage's pool to another's: which layers' places, for a page of each group. A group that has fewer of
    them than another goes on with a place past the last one, which nothing is written to."""

    source: int  # stages
    target: int
    from_places: np.ndarray  # int32 [groups, layers]
    to_places: np.ndarray


def routes(groups: LayerGroups, source: Sequence[range], target: Sequence[range]) -> list[Route]:
    """All routes between two partitions of the same layers into stages."""
    found = []
    for number, of_source in enumerate(source):
        for other, of_target in enumerate(target):
            both = [
                [layer for layer in groups.layers_of(group) if layer in of_source and layer in of_target]
                for group in range(len(groups.spans))
            ]
            most = max(map(len, both))
            if most:
                here, there = groups.of_stage(of_source), groups.of_stage(of_target)
                found.append(Route(number, other, _places(here, both, most), _places(there, both, most)))
    return found


def _places(stage: LayerGroups, layers: list[list[int]], most: int) -> np.ndarray:
    of_groups = [[stage.places[layer][1] for layer in of_group] for of_group in layers]
    return np.array([places + [stage.size] * (most - len(places)) for places in of_groups], np.int32)


def gather_layers(pages: Pages, page_ids: Int[Array, " X"], places: Int[Array, "X L"], heads: HeadLayout | None) -> Gathered:
    """Copies of some layers of these pages, in the model's own heads."""
    return to_model_heads(pages.at[places, :, page_ids[:, None]].get(mode="clip"), heads)


def scatter_layers(pages: Pages, moved: Gathered, page_ids: Int[Array, " X"], places: Int[Array, "X L"], heads: HeadLayout | None) -> Pages:
    """Scatter them to these layers of a pool's pages; padding goes to the null page, or nowhere."""
    return pages.at[places, :, page_ids[:, None]].set(to_pool_heads(moved, heads, pages), mode="drop")


class StagePageTransport:
    """One direction, from a role's pools to the other's. Calls are asynchronous, like `PageMover`'s."""

    def __init__(self, name: str, all_routes: Sequence[Route], source: Sequence[PagePool], target: Sequence[PagePool]) -> None:
        self._name = name
        self._routes = all_routes
        self._source, self._target = source, target
        self._programs: dict[str, Executable] = {}

    def programs(self) -> list[ProgramSource]:
        """The programs to compile: a gather and a scatter for each route and bucket."""
        sources = []
        for number, route in enumerate(self._routes):
            source, target = self._source[route.source], self._target[route.target]
            num_layers = route.from_places.shape[1]
            for size in MOVE_BUCKETS:
                gather = partial(gather_layers, heads=source.heads)
                sources.append(
                    ProgramSource(
                        self._of(number, "gather", size), gather, (source.abstract, *_indices(source, size, num_layers)), source.mesh
                    )
                )
                moved = target.abstract_moved(size, num_layers)
                arguments = (target.abstract, moved, *_indices(target, size, num_layers))
                scatter = partial(scatter_layers, heads=target.heads)
                sources.append(ProgramSource(self._of(number, "scatter", size), scatter, arguments, target.mesh, donated=(0,)))
        return sources

    def start(self, programs: dict[str, Executable]) -> None:
        """Set the compiled programs."""
        self._programs = programs

    def move(self, source_ids: Sequence[int], target_ids: Sequence[int], groups: Sequence[int]) -> None:
        """Copy at most MOVE_BUCKETS[-1] pages, of these groups, to others."""
        size = bucket_for(len(source_ids), MOVE_BUCKETS)
        of_pages = padded(groups, size)  # padding is of the null page, whichever group's
        from_ids, to_ids = padded(source_ids, size), padded(target_ids, size)
        for number, route in enumerate(self._routes):
            source, target = self._source[route.source], self._target[route.target]
            moved = self._programs[self._of(number, "gather", size)](source.array, from_ids, route.from_places[of_pages])
            moved = move(moved, target.abstract_moved(size, route.from_places.shape[1]).sharding)
            scatter = self._programs[self._of(number, "scatter", size)]
            target.array = scatter(target.array, moved, to_ids, route.to_places[of_pages])

    def _of(self, number: int, what: str, size: int) -> str:
        return f"{self._name} route {number + 1} {what}/{size}"


def _indices(pool: PagePool, size: int, num_layers: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    on_mesh = replicated(pool.mesh)
    return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=on_mesh), jax.ShapeDtypeStruct((size, num_layers), jnp.int32, sharding=on_mesh)
