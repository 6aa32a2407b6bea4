"""Pages of one size read as pages of another have the same tokens, in every group, whatever is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_transfer.handoff import HandOffError
from jaxinfer.kv_transfer.kv_sender import KVSender
from jaxinfer.kv_transfer.repaging import Repaging
from pallas_kernels.span import FULL_ATTENTION, Span

SPEC = PageSpec(num_layers=3, num_kv_heads=2, head_size=4, page_size=1, bytes_per_value=2, spans=(FULL_ATTENTION, Span(window=9)))
NUM_TOKENS = 60
TOKENS = np.random.default_rng(0).integers(1, 2**16, (2, 3, 2, 2, NUM_TOKENS, 4), np.uint16)  # group, layer, side, head


def pages_of(spec: PageSpec, tokens: np.ndarray) -> dict[int, np.ndarray]:
    """By place in the page table, those that have any tokens but zeros."""
    found = {}
    for block in range(spec.blocks_for(NUM_TOKENS)):
        for group in range(spec.num_groups):
            page = np.zeros((3, 2, 2, spec.page_size, 4), np.uint16)
            part = tokens[group, :, :, :, block * spec.page_size : (block + 1) * spec.page_size]
            page[:, :, :, : part.shape[3]] = part
            if page.any():
                found[block * spec.num_groups + group] = page.reshape(-1).view(np.uint8)
    return found


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, NUM_TOKENS - 1), st.booleans())
def test_the_same_tokens_in_every_size(own_size: int, asked_size: int, first: int, is_late: bool) -> None:
    """The second group has nothing before a window's first token, or no more than whole own pages."""
    own, asked = replace(SPEC, page_size=own_size), replace(SPEC, page_size=asked_size)
    kept = TOKENS.copy()
    kept[1, :, :, :, : first // own_size * own_size] = 0
    pages, expected = pages_of(own, kept), pages_of(asked, kept)
    sender, later = KVSender(0, Repaging(own, asked)), dict(list(pages.items())[::2]) if is_late else {}
    for place, page in pages.items():
        if place not in later:
            sender.add([place], page.reshape(1, -1))
    for place, page in later.items():
        sender.add([place], page.reshape(1, -1))
    sender.finish()
    for place, page in expected.items():
        assert sender.page(place, 5.0).tobytes() == page.tobytes(), place
    with pytest.raises(HandOffError, match="there is no page"):
        sender.page(2 * 100 * own_size, 5.0)


def test_a_page_waits_for_all_that_it_is_made_of() -> None:
    own, asked = replace(SPEC, page_size=4), replace(SPEC, page_size=6)
    pages, sender = pages_of(own, TOKENS), KVSender(0, Repaging(own, asked))
    sender.add([0, 1], np.stack([pages[0], pages[1]]))
    with pytest.raises(HandOffError, match=r"did not come within 0.05 s"):
        sender.page(0, 0.05)
    sender.add([2], pages[2].reshape(1, -1))
    assert sender.page(0, 5.0).tobytes() == pages_of(asked, TOKENS)[0].tobytes()
