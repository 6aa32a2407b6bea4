import numpy as np
import pytest

from jaxinfer.kv_cache.allocator import PageAllocator
from jaxinfer.kv_cache.spec import NULL_PAGE


def test_pages_come_lowest_first_and_never_the_null_page():
    allocator = PageAllocator(6)
    assert allocator.num_pages == 5
    assert allocator.allocate(3) == [1, 2, 3]
    assert allocator.allocate(2) == [4, 5]
    allocator.release([4, 2])
    assert allocator.allocate(1) == [2]
    assert NULL_PAGE == 0


def test_too_many_takes_nothing():
    allocator = PageAllocator(4)
    allocator.allocate(2)
    assert allocator.allocate(2) is None
    assert (allocator.num_free, allocator.num_used) == (1, 2)
    assert allocator.allocate(0) == []


def test_a_page_is_free_after_its_last_reader():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.retain(pages)
    allocator.release(pages)
    assert [allocator.references(page) for page in pages] == [1, 1]
    assert allocator.num_used == 2
    allocator.release(pages)
    assert allocator.num_used == 0


def test_a_free_page_can_neither_be_released_nor_retained():
    allocator = PageAllocator(4)
    with pytest.raises(AssertionError, match="page 2 is free already"):
        allocator.release([2])
    with pytest.raises(AssertionError, match="page 2 is free"):
        allocator.retain([2])


def test_thousands_of_steps_agree_with_a_set():
    random = np.random.default_rng(0)
    allocator, held = PageAllocator(50), []
    for _ in range(5000):
        if random.random() < 0.5:
            count = int(random.integers(0, 9))
            pages = allocator.allocate(count)
            assert (pages is None) == (count > 49 - len({page for run in held for page in run}))
            if pages:
                assert not set(pages) & {page for run in held for page in run}
                held.append(pages)
        elif held:
            run = held[int(random.integers(len(held)))]
            if random.random() < 0.3:
                allocator.retain(run)
                held.append(list(run))
            else:
                held.remove(run)
                allocator.release(run)
        owners = [page for run in held for page in run]
        assert all(allocator.references(page) == owners.count(page) for page in range(50))
        assert allocator.num_used == len(set(owners))
