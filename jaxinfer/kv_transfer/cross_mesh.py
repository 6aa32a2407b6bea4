"""Two meshes: pages are gathered on the prefill mesh, moved by `device_put`, and scattered into the decode mesh's pool."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.pages import PagePool, Pages
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.runtime.buckets import bucket_for
from jaxinfer.runtime.compilation import Executable, ProgramSource
from jaxinfer.sequence import Sequence
from sharding.partition import replicated

Gathered = Float[Array, "L 2 X K G H"]

MOVE_BUCKETS = (4, 32)  # pages moved at once; longer hand-offs go in several moves


def gather(pages: Pages, page_ids: Int[Array, " X"]) -> Gathered:
    """Copies of these pages of every layer, as one array, so that one transfer moves them."""
    return pages[:, :, page_ids]


def scatter(pages: Pages, moved: Gathered, page_ids: Int[Array, " X"]) -> Pages:
    """Put moved pages into the pool at these places; padding goes to the null page."""
    return pages.at[:, :, page_ids].set(moved)


def transfer_programs(prefill_pool: PagePool, decode_pool: PagePool) -> list[ProgramSource]:
    """The gather and scatter programs of each bucket, to be compiled with all the others."""
    programs = []
    for size in MOVE_BUCKETS:
        source_ids = jax.ShapeDtypeStruct((size,), np.int32, sharding=replicated(prefill_pool.mesh))
        target_ids = jax.ShapeDtypeStruct((size,), np.int32, sharding=replicated(decode_pool.mesh))
        moved = decode_pool.abstract_moved(size)
        programs += [
            ProgramSource(f"gather pages/{size}", gather, (prefill_pool.abstract, source_ids), prefill_pool.mesh),
            ProgramSource(f"scatter pages/{size}", scatter, (decode_pool.abstract, moved, target_ids), decode_pool.mesh, donated=(0,)),
        ]
    return programs


class CrossMeshTransfer:
    def __init__(
        self,
        programs: dict[str, Executable],
        prefill: tuple[PagePool, KVManager],
        decode: tuple[PagePool, KVManager],
    ) -> None:
        self._programs = programs
        self._prefill_pool, self._prefill_manager = prefill
        self._decode_pool, self._decode_manager = decode
        self._put = {size: partial(jax.device_put, device=self._decode_pool.abstract_moved(size).sharding) for size in MOVE_BUCKETS}
        self.num_pages_moved = 0

    def move(self, sequence: Sequence, keep_free: int) -> bool:
        """See `KVTransfer`. Moves only what the decode mesh does not hold already. Nothing here waits: both devices run what they are given
        in order, so the pages given back on the prefill mesh are read before any later program writes to them."""
        prefill, decode = sequence.prefill_pages, sequence.decode_pages
        num_tokens, page_size = len(sequence.token_ids) - 1, self._prefill_manager.spec.page_size  # the newest token is not in a page yet
        held = self._decode_manager.take_cached(decode, sequence.token_ids, num_tokens, sequence.context) // page_size
        if not self._decode_manager.grow(decode, len(prefill) * page_size, keep_free):
            self._decode_manager.free(decode)
            return False
        most = MOVE_BUCKETS[-1]
        for start in range(held, len(prefill), most):
            source, target = prefill[start : start + most], decode[start : start + most]
            self._move(source, target, bucket_for(len(source), MOVE_BUCKETS))
            self.num_pages_moved += len(source)
        self._decode_manager.keep(decode, sequence.token_ids, num_tokens, sequence.context)
        self._prefill_manager.free(prefill)
        return True

    def warm_up(self) -> None:
        """Move the null page in every size: between meshes of different shapes `device_put` compiles programs of its own."""
        for size in MOVE_BUCKETS:
            self._move([NULL_PAGE], [NULL_PAGE], size)

    def _move(self, source: list[int], target: list[int], size: int) -> None:
        moved = self._programs[f"gather pages/{size}"](self._prefill_pool.array, _padded(source, size))
        moved = self._put[size](moved)
        self._decode_pool.array = self._programs[f"scatter pages/{size}"](self._decode_pool.array, moved, _padded(target, size))


def _padded(pages: list[int], size: int) -> np.ndarray:
    return np.array(pages + [NULL_PAGE] * (size - len(pages)), np.int32)
