"""StagedPageMover: pages of a role with pipeline stages, each of which has some layers, as whole pages on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.kv_cache.spec import NULL_PAGE, LayerGroups
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, PageMover
from jaxinfer.programs.buckets import bucket_for


@dataclass(frozen=True)
class _Places:
    """Of a stage's layers, for each group: where they are in the stage's pages, and where in whole ones."""

    in_stage: list[list[int]]
    in_page: list[list[int]]

    @classmethod
    def of(cls, groups: LayerGroups, layers: range) -> _Places:
        stage = groups.of_stage(layers)
        own = [[layer for layer in groups.layers_of(group) if layer in layers] for group in range(len(groups.spans))]
        return cls(
            [[stage.places[layer][1] for layer in of_group] for of_group in own],
            [[groups.places[layer][1] for layer in of_group] for of_group in own],
        )


class StagedPageMover:
    """As `PageMover` for a role without stages; whole pages have the layers of all of them, in the model's order.
    `movers`, `layers`: of each stage."""

    def __init__(self, movers: Sequence[PageMover], groups: LayerGroups, layers: Sequence[range]) -> None:
        self._movers = tuple(movers)
        self._num_layers = groups.size
        self._places = [_Places.of(groups, of_stage) for of_stage in layers]

    def gather(self, page_ids: Sequence[int], groups: Sequence[int] = ()) -> GatheredStages:
        """Copies of pages of these groups of layers; without `groups` all are of the first. They become one array when
        the host reads them."""
        parts = [mover.gather(page_ids) for mover in self._movers]
        return GatheredStages(parts, self._places, self._num_layers, list(groups) or [0] * len(page_ids))

    def put_bytes(self, pages: np.ndarray, groups: Sequence[int] = ()) -> list[Any]:
        """Copy whole pages as bytes, uint8[num_pages, bytes of a page], to the stages' meshes."""
        of_pages, size = np.array(list(groups) or [0] * len(pages)), bucket_for(len(pages), MOVE_BUCKETS)
        moved = []
        for mover, places in zip(self._movers, self._places, strict=True):
            abstract = mover.abstract_moved(size)
            whole = pages.view(abstract.dtype).reshape(len(pages), self._num_layers, *abstract.shape[2:])
            part = np.zeros(abstract.shape, abstract.dtype)
            for group in np.unique(of_pages):
                (rows,) = np.nonzero(of_pages == group)
                part[np.ix_(rows, places.in_stage[group])] = whole[np.ix_(rows, places.in_page[group])]
            moved.append(mover.put(part))
        return moved

    def scatter(self, moved: Sequence[Any], page_ids: Sequence[int]) -> None:
        """Write pages that `put_bytes` returned."""
        for mover, part in zip(self._movers, moved, strict=True):
            mover.scatter(part, page_ids)

    def warm_up(self) -> None:
        """Copy the null page to the host and back in every size."""
        for size in MOVE_BUCKETS:
            page = np.asarray(self.gather([NULL_PAGE] * size))
            self.scatter(self.put_bytes(page.reshape(size, -1).view(np.uint8)), [NULL_PAGE] * size)

    def wait(self) -> None:
        """Wait until everything written is in the pools."""
        for mover in self._movers:
            mover.wait()


class GatheredStages:
    """Whole pages whose parts are on the devices of several stages, [pages, layers of a group, S, K, G, H]."""

    def __init__(self, parts: Sequence[Any], places: Sequence[_Places], num_layers: int, groups: Sequence[int]) -> None:
        self._parts, self._places, self._num_layers, self._groups = parts, places, num_layers, np.array(groups)

    def copy_to_host_async(self) -> None:
        """Begin to copy; reading waits for what is left."""
        for part in self._parts:
            part.copy_to_host_async()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        parts = [np.asarray(part) for part in self._parts]
        whole = np.zeros((len(parts[0]), self._num_layers, *parts[0].shape[2:]), parts[0].dtype)
        for part, places in zip(parts, self._places, strict=True):
            for group in np.unique(self._groups):
                (rows,) = np.nonzero(self._groups == group)
                whole[np.ix_(rows, places.in_page[group])] = part[np.ix_(rows, places.in_stage[group])]
        return whole if dtype is None else whole.astype(dtype)
