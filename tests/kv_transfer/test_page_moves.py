"""Pages out of a pool as bytes and back, on one device and split over two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, PageMover, gather_programs, scatter_programs
from jaxinfer.runtime.compilation import compile_programs
from sharding.mesh import make_mesh
from sharding.rules import RULES

SPEC = PageSpec(num_layers=3, num_kv_heads=2, head_size=8, page_size=4, bytes_per_value=2)
NUM_PAGES = 40


@pytest.fixture(scope="module", params=[(0,), (0, 1)], ids=["one device", "two devices"])
def moved(request):
    """A pool of bfloat16 pages and its mover."""
    pool = PagePool(SPEC, NUM_PAGES, jnp.dtype("bfloat16"), make_mesh(request.param), RULES["prefill"])
    programs = compile_programs(gather_programs("x", pool) + scatter_programs("x", pool))
    return pool, PageMover("x", pool, programs)


@pytest.fixture
def pool_and_mover(moved):
    """The pool anew: every number of it is another."""
    pool, mover = moved
    numbers = np.arange(np.prod(pool.abstract.shape), dtype=np.uint16).reshape(pool.abstract.shape).view(jnp.bfloat16)
    pool.array = jax.device_put(numbers, pool.abstract.sharding)
    return pool, mover, numbers


@pytest.mark.parametrize("num_pages", [1, 4, 5, 32])
def test_pages_go_down_and_come_back_elsewhere(pool_and_mover, num_pages):
    pool, mover, numbers = pool_and_mover
    random = np.random.default_rng(num_pages)
    source = random.permutation(np.arange(1, NUM_PAGES))[:num_pages].tolist()
    target = random.permutation(np.arange(1, NUM_PAGES))[:num_pages].tolist()
    down = np.asarray(mover.gather(source)).view(np.uint8).reshape(-1, SPEC.page_bytes)
    assert len(down) == next(size for size in MOVE_BUCKETS if size >= num_pages)
    for page, row in zip(source, down, strict=False):
        assert row.tobytes() == numbers[:, :, page].tobytes()
    mover.scatter(mover.put_bytes(down[:num_pages]), target)
    expected = numbers.copy()
    expected[:, :, target] = numbers[:, :, source]
    after = np.array(pool.array)
    for pages in (after, expected):
        pages[:, :, NULL_PAGE] = 0  # which belongs to nobody
    assert after.tobytes() == expected.tobytes()


def test_bytes_that_are_brought_up_are_not_changed(pool_and_mover):
    """The reader's array is read-only and may be several sequences'."""
    _, mover, _ = pool_and_mover
    pages = np.arange(3 * SPEC.page_bytes // 2, dtype=np.uint16).view(np.uint8).reshape(3, -1)  # numbers all: a pool holds no others
    pages.flags.writeable = False
    up = mover.put_bytes(pages)
    mover.scatter(up, [1, 2, 3])
    mover.wait()
    assert np.asarray(mover.gather([1, 2, 3])).view(np.uint8).reshape(-1, SPEC.page_bytes)[:3].tobytes() == pages.tobytes()
