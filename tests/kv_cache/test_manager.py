from jaxinfer.kv_cache.block_keys import block_keys, digests
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.request import DEFAULT_CONTEXT, RequestContext
from tests.sequences import History

SPEC = PageSpec(num_layers=2, num_kv_heads=1, head_size=4, page_size=4, bytes_per_value=4)


def manager(num_pages: int = 10) -> KVManager:
    return KVManager(SPEC, num_pages + 1)


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
    assert not pages.grow(table, 24, reserved_pages=5)
    assert len(table) == 4
    assert pages.grow(table, 24, reserved_pages=4)
    assert pages.grow(table, 24, reserved_pages=100), "nothing is needed"


def test_a_finished_sequences_pages_are_found_by_the_next_and_go_when_room_is_needed():
    pages, table, tokens = manager(), [], list(range(13))
    pages.grow(table, 13)
    first = list(table)
    pages.insert(table, History(tokens), 13)
    pages.free(table)
    assert (pages.num_used, pages.num_cached, pages.num_free) == (0, 3, 10)
    assert pages.match_prefix(table, History([*tokens[:8], 99, 99, 99, 99, 99]), 12) == 8
    assert table == first[:2]
    other: list[int] = []
    assert not pages.grow(other, 4 * 9), "two of ten are read"
    assert pages.grow(other, 4 * 8)
    assert pages.num_cached == 2, "the third page went"
    pages.free(other)
    pages.free(table)
    assert pages.num_free == 10


def test_no_more_is_taken_than_asked_for_and_only_within_a_namespace():
    pages, table, tokens = manager(), [], list(range(12))
    pages.grow(table, 12)
    pages.insert(table, History(tokens), 12)
    found: list[int] = []
    assert pages.match_prefix(found, History(tokens), 11) == 8
    pages.free(found)
    assert pages.match_prefix(found, History(tokens), 3) == 0
    assert pages.match_prefix(found, History(tokens, RequestContext(namespace="another")), 12) == 0
    assert pages.num_used == 3


def test_a_fork_reads_whole_pages_of_its_prompt_and_writes_to_a_page_of_its_own():
    pages, leader, table = manager(), [], []
    pages.grow(leader, 10)
    pages.share("prompt", leader)
    [(source, target)] = pages.fork("prompt", table, 10)
    assert (source, table) == (leader[2], [*leader[:2], target])
    assert target not in leader
    pages.free(leader)
    pages.free(table)
    pages.unshare("prompt")
    assert pages.num_free == 10
    pages.grow(leader, 8)
    pages.share("whole pages", leader)
    assert pages.fork("whole pages", table, 8) == []
    assert table == leader


def test_pages_that_are_about_to_be_used_anew_can_be_saved():
    pages, table, saved = manager(), [], []
    pages.save_evicted = saved.extend
    pages.grow(table, 12)
    held = list(table)
    pages.insert(table, History(list(range(12))), 12)
    pages.free(table)
    pages.grow(table, 40)
    assert [node.page for node in saved] == held[::-1], "leaves first"
    assert saved[-1].digest == digests("", block_keys(History(range(12)), 4, 1))[0]


def test_pages_of_a_session_stay_longer():
    now = [0.0]
    pages = KVManager(SPEC, 11, session_seconds=60, clock=lambda: now[0])
    for start, context in ((0, RequestContext(session="s")), (100, DEFAULT_CONTEXT)):
        table: list[int] = []
        pages.grow(table, 20)
        pages.insert(table, History(range(start, start + 20), context), 20)
        pages.free(table)
    table = []
    pages.grow(table, 20)
    assert pages.match_prefix([], History(range(100, 120)), 20) == 0, "younger, but of no session"
    pages.free(table)
    kept: list[int] = []
    assert pages.match_prefix(kept, History(range(20)), 20) == 20
    pages.free(kept)


def test_without_a_prefix_cache_nothing_is_kept():
    pages, table = KVManager(SPEC, 11, prefix_cache=False), []
    pages.grow(table, 12)
    pages.insert(table, History(range(12)), 12)
    pages.free(table)
    assert pages.match_prefix(table, History(range(12)), 12) == 0
    assert pages.num_cached == 0
