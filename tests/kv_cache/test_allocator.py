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


def test_a_kept_page_outlives_its_last_reader_and_can_be_read_again():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.keep(pages[0])
    assert (allocator.num_used, allocator.num_evictable) == (2, 0)
    allocator.release(pages)
    assert (allocator.num_free, allocator.num_used, allocator.num_evictable) == (2, 0, 1)
    assert [allocator.is_cached(page) for page in pages] == [True, False]
    assert allocator.allocate(3) is None, "an evictable page is not free"
    allocator.retain([pages[0], pages[0]])
    assert (allocator.num_used, allocator.num_evictable, allocator.references(pages[0])) == (1, 0, 2)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_page_that_is_kept_no_longer_is_free_when_nobody_reads_it(is_read):
    allocator = PageAllocator(3)
    [page] = allocator.allocate(1)
    allocator.keep(page)
    if not is_read:
        allocator.release([page])
    allocator.drop(page)
    assert not allocator.is_cached(page)
    assert (allocator.num_free, allocator.num_used, allocator.num_evictable) == ((1, 1, 0) if is_read else (2, 0, 0))
    if is_read:
        allocator.release([page])
    assert allocator.allocate(2) == [1, 2]


def test_it_tells_of_each_kept_page_that_the_last_reader_left():
    allocator, told = PageAllocator(5), []
    allocator.when_evictable = told.append
    pages = allocator.allocate(3)
    allocator.retain(pages)
    for page in pages[:2]:
        allocator.keep(page)
    allocator.release(pages)
    assert told == []
    allocator.release(pages)
    assert told == pages[:2]
    allocator.retain(pages[:1])
    allocator.drop(pages[0])
    allocator.release(pages[:1])
    assert told == pages[:2], "kept no longer"


def test_misuse_is_refused():
    allocator = PageAllocator(4)
    with pytest.raises(AssertionError, match="page 2 has no reader"):
        allocator.release([2])
    with pytest.raises(AssertionError, match="page 2 is free"):
        allocator.retain([2])
    with pytest.raises(AssertionError, match="page 2 has no reader"):
        allocator.keep(2)
    with pytest.raises(AssertionError, match="page 2 is not kept"):
        allocator.drop(2)
    [page] = allocator.allocate(1)
    allocator.keep(page)
    with pytest.raises(AssertionError, match="page 1 is kept already"):
        allocator.keep(page)


def test_thousands_of_steps_agree_with_sets():
    random = np.random.default_rng(0)
    allocator, held, kept = PageAllocator(50), [], set()
    for _ in range(5000):
        act, owners = random.random(), {page for run in held for page in run}
        if act < 0.45:
            count = int(random.integers(0, 9))
            pages = allocator.allocate(count)
            assert (pages is None) == (count > 49 - len(owners | kept))
            if pages:
                assert not set(pages) & (owners | kept)
                held.append(pages)
        elif act < 0.55 and kept:
            page = int(random.choice(sorted(kept)))
            if random.random() < 0.5:
                kept.remove(page)
                allocator.drop(page)
            else:
                allocator.retain([page])
                held.append([page])
        elif held:
            run = held[int(random.integers(len(held)))]
            if random.random() < 0.2:
                allocator.retain(run)
                held.append(list(run))
            elif random.random() < 0.2:
                for page in set(run) - kept:
                    allocator.keep(page)
                kept |= set(run)
            else:
                held.remove(run)
                allocator.release(run)
        owners = [page for run in held for page in run]
        assert all(allocator.references(page) == owners.count(page) for page in range(50))
        assert {page for page in range(50) if allocator.is_cached(page)} == kept
        assert allocator.num_used == len(set(owners))
        assert allocator.num_evictable == len(kept - set(owners))
        assert allocator.num_free == 49 - len(kept | set(owners))
