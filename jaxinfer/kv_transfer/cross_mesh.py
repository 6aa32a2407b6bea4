"""Two meshes: pages are gathered on the prefill mesh, moved by `device_put`, and scattered into the decode mesh's pool."""

from __future__ import annotations

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, PageMover
from jaxinfer.sequence import Sequence


class CrossMeshTransfer:
    def __init__(self, prefill: PageMover, decode: PageMover, prefill_manager: KVManager, decode_manager: KVManager) -> None:
        self._prefill, self._decode = prefill, decode
        self._prefill_manager, self._decode_manager = prefill_manager, decode_manager
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
            self._move(source, target)
            self.num_pages_moved += len(source)
        self._decode_manager.keep(decode, sequence.token_ids, num_tokens, sequence.context)
        self._prefill_manager.free(prefill)
        return True

    def warm_up(self) -> None:
        """Move the null page in every size: between meshes of different shapes `device_put` compiles programs of its own."""
        for size in MOVE_BUCKETS:
            self._move([NULL_PAGE] * size, [NULL_PAGE] * size)

    def _move(self, source: list[int], target: list[int]) -> None:
        self._decode.scatter(self._decode.put(self._prefill.gather(source)), target)
