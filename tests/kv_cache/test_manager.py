from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.sequence import SharedPrefix


def manager(num_pages: int = 10) -> KVManager:
    return KVManager(PageSpec(num_layers=2, num_kv_heads=1, head_size=4, page_size=4, bytes_per_value=4), num_pages + 1)


def test_a_table_grows_by_whole_pages():
    pages, table = manager(), []
    for num_tokens, num_pages in ((1, 1), (4, 1), (5, 2), (8, 2), (3, 2), (17, 5)):
        assert pages.grow(table, num_tokens)
        assert len(table) == num_pages
    assert pages.num_used == 5
    pages.free(table)
    assert table == []
    assert pages.num_used == 0


def test_growing_too_far_changes_nothing():
    pages, table = manager(), []
    assert pages.grow(table, 16)
    assert not pages.grow(table, 41)
    assert not pages.grow(table, 24, keep_free=5)
    assert len(table) == 4
    assert pages.grow(table, 24, keep_free=4)
    assert pages.grow(table, 24, keep_free=100), "nothing is needed"


def test_a_prefix_shares_all_whole_pages_before_the_last_token():
    for num_tokens, num_shared in ((1, 0), (4, 0), (5, 1), (8, 1), (9, 2)):
        pages, table, prefix = manager(), [], SharedPrefix(num_sharers=1)
        pages.grow(table, num_tokens)
        pages.share(prefix, table, num_tokens)
        assert prefix.is_ready
        assert prefix.pages == table[:num_shared]
        sibling = []
        assert pages.take_shared(prefix, sibling) == 4 * num_shared
        assert sibling == table[:num_shared]
        pages.free(table)
        assert pages.num_used == num_shared, "the sibling's own"
        pages.free(sibling)
        assert pages.num_used == 0


def test_a_prefix_is_held_until_the_last_sequence_has_it_or_leaves():
    pages, table, prefix = manager(), [], SharedPrefix(num_sharers=3)
    pages.grow(table, 12)
    pages.share(prefix, table, 12)
    pages.free(table)
    first, second = [], []
    pages.take_shared(prefix, first)
    pages.leave(prefix)
    assert pages.num_used == 2
    pages.take_shared(prefix, second)
    assert prefix.pages == []
    pages.free(first)
    pages.free(second)
    assert pages.num_used == 0


def test_a_prefix_given_back_early_leaves_nothing_to_take():
    pages, table, prefix = manager(), [], SharedPrefix(num_sharers=2)
    pages.grow(table, 12)
    pages.share(prefix, table, 12)
    pages.free(table)
    pages.unshare(prefix)
    assert pages.num_used == 0
    late = []
    assert pages.take_shared(prefix, late) == 0
    pages.leave(prefix)
    assert (late, pages.num_used, prefix.num_sharers) == ([], 0, 0)
