"""Pages out of a pool and into one: gathered into one array, so that one transfer moves them, and scattered from one.
Under way they have the model's KV heads, each once, whatever a mesh has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfer.architecture.head_layout import HeadLayout
from jaxinfer.kv_cache.pages import PagePool, Pages
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.programs.buckets import bucket_for
from jaxinfer.programs.compilation import Executable, ProgramSource
from sharding.mesh import spans_processes
from sharding.partition import move, place, replicated

# Pages outermost: each is a run of bytes on the host, as the tiers keep it, and on a CPU both moves are quicker than
# by layers.
Gathered = Float[Array, "X L S K G H"]

MOVE_BUCKETS = (4, 32)  # pages moved at once; more go in several moves


def gather(pages: Pages, page_ids: Int[Array, " X"], heads: HeadLayout | None = None) -> Gathered:
    """Gather copies of these pages."""
    return to_model_heads(jnp.moveaxis(pages[:, :, page_ids], 2, 0), heads)


def scatter(pages: Pages, moved: Gathered, page_ids: Int[Array, " X"], heads: HeadLayout | None = None) -> Pages:
    """Scatter moved pages to these pages of the pool; padding goes to the null page."""
    return pages.at[:, :, page_ids].set(jnp.moveaxis(to_pool_heads(moved, heads, pages), 0, 2))


def to_model_heads(gathered: Gathered, heads: HeadLayout | None) -> Gathered:
    """Gather from a pool with a mesh's heads: one copy of each of the model's heads, on every device."""
    if heads is None:
        return gathered
    firsts = slice(None, heads.model_kv_heads * heads.copies, heads.copies)
    return jax.sharding.reshard(gathered, PartitionSpec())[:, :, :, firsts]


def to_pool_heads(moved: Gathered, heads: HeadLayout | None, pages: Pages) -> Gathered:
    """Scatter to a pool with a mesh's heads: fills every copy; heads of zeros stay zero."""
    if heads is None:
        return moved
    copies = jnp.repeat(moved, heads.copies, axis=3)
    missing = heads.num_kv_heads - copies.shape[3]
    filled_up = jnp.pad(copies, [(0, missing if axis == 3 else 0) for axis in range(copies.ndim)])
    pool_axes = jax.typeof(pages).sharding.spec
    return jax.sharding.reshard(filled_up, PartitionSpec(None, None, None, pool_axes[3], None, None))


def gather_whole(pages: Pages, page_ids: Int[Array, " X"]) -> Gathered:
    """Gather copies of these pages on every device, where processes have a part of each."""
    return jax.sharding.reshard(gather(pages, page_ids), PartitionSpec())


def gather_programs(name: str, pool: PagePool) -> list[ProgramSource]:
    """The gather programs to compile, one a bucket; two, where one process can't read what is split over the mesh."""
    functions: dict[str, Callable[..., Gathered]] = {"gather": partial(gather, heads=pool.heads)}
    if pool.heads is None and spans_processes(pool.mesh):
        functions = {"gather": gather_whole, "gather shards": gather}
    return [
        ProgramSource(f"{name} {what}/{size}", function, (pool.abstract, _abstract_ids(pool, size)), pool.mesh)
        for what, function in functions.items()
        for size in MOVE_BUCKETS
    ]


def scatter_programs(name: str, pool: PagePool) -> list[ProgramSource]:
    """The scatter programs to compile, one a bucket."""
    function = partial(scatter, heads=pool.heads)
    return [
        ProgramSource(
            f"{name} scatter/{size}",
            function,
            (pool.abstract, pool.abstract_moved(size), _abstract_ids(pool, size)),
            pool.mesh,
            donated=(0,),
        )
        for size in MOVE_BUCKETS
    ]


def _abstract_ids(pool: PagePool, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), np.int32, sharding=replicated(pool.mesh))


class HostPageMover(Protocol):
    """Copies pages of a role to the host and back. Without `groups` all pages are of the first group of layers."""

    def gather(self, page_ids: Sequence[int], groups: Sequence[int] = ()) -> Any:
        """Copies of pages: something that `np.asarray` makes [pages, ...] of, each page's bytes in one run, with
        padding after them. `copy_to_host_async` begins to."""
        ...

    def put_bytes(self, pages: np.ndarray, groups: Sequence[int] = ()) -> Any:
        """Copy pages, uint8[num_pages, bytes of a page], to the devices, for `scatter`."""
        ...

    def scatter(self, moved: Any, page_ids: Sequence[int]) -> None:
        """Write them."""
        ...

    def warm_up(self) -> None:
        """Move pages of every size both ways."""
        ...

    def wait(self) -> None:
        """Wait until everything written is there."""
        ...


class PageMover:
    """One pool's compiled programs under a name. At most MOVE_BUCKETS[-1] pages a call; arrays are padded to a
    bucket. Nothing here waits: a device runs what it is given in order, so pages may be given to another owner as
    soon as they have been gathered."""

    def __init__(self, name: str, pool: PagePool, programs: dict[str, Executable]) -> None:
        self._name = name
        self._pool = pool
        self._programs = programs

    def gather(self, page_ids: Sequence[int], groups: Sequence[int] = ()) -> Gathered:
        """Copies of pages, whatever their groups of layers, which the host can read."""
        return self._gather("gather", page_ids)

    def gather_shards(self, page_ids: Sequence[int]) -> Gathered:
        """Copies of pages for another mesh, split over this one's devices as they are."""
        has_shards = f"{self._name} gather shards/{MOVE_BUCKETS[0]}" in self._programs
        return self._gather("gather shards" if has_shards else "gather", page_ids)

    def _gather(self, what: str, page_ids: Sequence[int]) -> Gathered:
        size = bucket_for(len(page_ids), MOVE_BUCKETS)
        return self._programs[f"{self._name} {what}/{size}"](self._pool.array, padded(page_ids, size))

    def abstract_moved(self, num_pages: int) -> jax.ShapeDtypeStruct:
        """Shape, type and place of that many gathered pages."""
        return self._pool.abstract_moved(num_pages)

    def put(self, moved: Gathered | np.ndarray) -> Gathered:
        """Copy gathered pages, from any device or the host, to the pool's mesh."""
        sharding = self._pool.abstract_moved(moved.shape[0]).sharding
        return move(moved, sharding) if isinstance(moved, jax.Array) else place(moved, sharding)

    def put_bytes(self, pages: np.ndarray, groups: Sequence[int] = ()) -> Gathered:
        """Copy pages as bytes, uint8[num_pages, bytes of a page], to the pool's mesh, whatever their groups."""
        size = bucket_for(len(pages), MOVE_BUCKETS)
        abstract = self._pool.abstract_moved(size)
        if len(pages) < size:
            pages = np.concatenate([pages, np.zeros((size - len(pages), pages.shape[1]), np.uint8)])
        return self.put(pages.view(abstract.dtype).reshape(abstract.shape))

    def scatter(self, moved: Gathered, page_ids: Sequence[int]) -> None:
        """Write pages that `put` returned."""
        size = moved.shape[0]
        self._pool.array = self._programs[f"{self._name} scatter/{size}"](self._pool.array, moved, padded(page_ids, size))

    def warm_up(self) -> None:
        """Copy the null page to the host and back in every size."""
        for size in MOVE_BUCKETS:
            page = np.asarray(self.gather([NULL_PAGE] * size))
            self.scatter(self.put_bytes(page.reshape(size, -1).view(np.uint8)), [NULL_PAGE] * size)

    def wait(self) -> None:
        """Wait until everything written is in the pool."""
        jax.block_until_ready(self._pool.array)


def padded(page_ids: Sequence[int], size: int) -> np.ndarray:
    """int32[size], with the null page's number after these."""
    filled_up = np.full(size, NULL_PAGE, np.int32)
    filled_up[: len(page_ids)] = page_ids
    return filled_up
