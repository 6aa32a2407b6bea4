"""Pages out of a pool as bytes and back, on one device and split over several, between pools too that have copies of
heads and heads of zeros."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.architecture.head_layout import HeadLayout
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from jaxinfer.kv_transfer.page_moves import MOVE_BUCKETS, PageMover, gather_programs, scatter_programs
from jaxinfer.programs.compilation import compile_programs
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


def pool_of(num_kv_heads: int, group: int, device_ids: tuple[int, ...]) -> tuple[PagePool, PageMover]:
    """Of a model with so many KV heads, on a mesh that may have others; every number of it is another, those of
    copies too."""
    heads = HeadLayout.of(num_kv_heads * group, num_kv_heads, len(device_ids))
    spec = replace(SPEC, num_kv_heads=num_kv_heads, bytes_per_value=4)
    pool = PagePool(spec, NUM_PAGES, jnp.dtype("float32"), make_mesh(device_ids), RULES["decode"], None if heads.is_models else heads)
    programs = compile_programs(gather_programs("x", pool) + scatter_programs("x", pool))
    numbers = np.arange(np.prod(pool.abstract.shape), dtype=np.float32).reshape(pool.abstract.shape) + 1
    pool.array = jax.device_put(numbers, pool.abstract.sharding)
    return pool, PageMover("x", pool, programs)


def numbers_of(num_pages: int, num_kv_heads: int) -> np.ndarray:
    """Pages under way, no number twice."""
    shape = (num_pages, SPEC.num_layers, SPEC.num_sides, num_kv_heads, SPEC.page_size, SPEC.head_size)
    return -1 - np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# KV heads, query heads of each, devices: heads of zeros, copies, and both.
@pytest.mark.parametrize("sizes", [(3, 3, 2), (2, 2, 4), (3, 3, 8)], ids=str)
def test_a_mesh_with_heads_of_its_own_fills_every_copy_and_gives_back_each_head_once(sizes):
    num_kv_heads, group, num_devices = sizes
    pool, mover = pool_of(num_kv_heads, group, tuple(range(num_devices)))
    assert pool.heads is not None
    before, target, moved = np.array(pool.array), [7, 3, 21, 5], numbers_of(4, num_kv_heads)
    mover.scatter(mover.put(moved), target)
    after = np.array(pool.array)
    for page, of_page in zip(target, moved, strict=True):
        for place, head in enumerate(pool.heads.kv_heads):
            np.testing.assert_array_equal(after[:, :, page, place], 0 if head is None else of_page[:, :, head])
    others = [page for page in range(1, NUM_PAGES) if page not in target]
    np.testing.assert_array_equal(after[:, :, others], before[:, :, others])
    np.testing.assert_array_equal(np.asarray(mover.gather(target)), moved)


@pytest.mark.parametrize(
    "meshes", [((0,), (0, 1, 2, 3)), ((4, 5, 6, 7), (0, 1)), ((0, 1), (2,)), ((0, 1, 2), tuple(range(8)))], ids=["1-4", "4-2", "2-1", "3-8"]
)
def test_pages_pass_between_meshes_with_other_heads(meshes):
    here, there = (pool_of(3, 3, device_ids)[1] for device_ids in meshes)
    moved = numbers_of(4, 3)
    here.scatter(here.put(moved), [1, 2, 3, 4])
    there.scatter(there.put(here.gather([4, 2, 1])), [9, 8, 7])
    np.testing.assert_array_equal(np.asarray(there.gather([7, 8, 9]))[:3], moved[[0, 1, 3]])


@pytest.mark.parametrize("meshes", [((0,), (0, 1, 2, 3)), ((4, 5, 6, 7), (0, 1)), ((0, 1), (2,))], ids=["1-4", "4-2", "2-1"])
def test_pages_of_latents_pass_between_meshes_that_share_out_their_tokens(meshes):
    """And as bytes, which are the same on any mesh."""
    spec, made = PageSpec(3, 1, 8, 32, 4, num_sides=1), []
    for device_ids in meshes:
        pool = PagePool(spec, NUM_PAGES, jnp.dtype("float32"), make_mesh(device_ids), RULES["decode"])
        programs = compile_programs(gather_programs("x", pool) + scatter_programs("x", pool))
        pool.allocate()
        assert pool.device_bytes == NUM_PAGES * spec.page_bytes // len(device_ids)
        made.append(PageMover("x", pool, programs))
    here, there = made
    moved = np.arange(4 * 3 * 32 * 8, dtype=np.float32).reshape(4, 3, 1, 1, 32, 8) + 1
    here.scatter(here.put(moved), [1, 2, 3, 4])
    there.scatter(there.put(here.gather([4, 2, 1])), [9, 8, 7])
    np.testing.assert_array_equal(np.asarray(there.gather([7, 8, 9]))[:3], moved[[0, 1, 3]])
    down = np.asarray(there.gather([7, 8, 9])).view(np.uint8).reshape(-1, spec.page_bytes)[:3]
    assert down.tobytes() == moved[[0, 1, 3]].tobytes()
    here.scatter(here.put_bytes(down), [11, 12, 13])
    np.testing.assert_array_equal(np.asarray(here.gather([11, 12, 13]))[:3], moved[[0, 1, 3]])


def test_pages_as_bytes_are_the_models_whatever_heads_a_mesh_has():
    (_, one), (_, eight) = pool_of(3, 3, (0,)), pool_of(3, 3, tuple(range(8)))
    one.scatter(one.put(numbers_of(4, 3)), [1, 2, 3, 4])
    down = np.asarray(one.gather([1, 2, 3, 4])).view(np.uint8).reshape(4, -1)
    eight.scatter(eight.put_bytes(down), [5, 6, 7, 8])
    assert np.asarray(eight.gather([5, 6, 7, 8])).tobytes() == down.tobytes()
