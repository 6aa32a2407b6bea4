"""Page tables and the prefix cache where some groups of layers attend to a bounded span: a window of 6 tokens, pages of 4."""

from __future__ import annotations

from dataclasses import replace

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from pallas_kernels.span import FULL_ATTENTION, Span
from tests.sequences import History

SPEC = PageSpec(num_layers=1, num_kv_heads=1, head_size=4, page_size=4, bytes_per_value=4, spans=(FULL_ATTENTION, Span(window=6)))
CHUNK = 8


def manager(num_pages: int = 40, spec: PageSpec = SPEC) -> KVManager:
    return KVManager(spec, num_pages + 1, chunk_size=CHUNK)


def runs_with_a_page(table: list[int], group: int = 1) -> list[int]:
    """The runs of which a group has a page."""
    return [run for run, page in enumerate(table[group :: SPEC.num_groups]) if page != NULL_PAGE]


def compute(pages: KVManager, tokens: list[int], num_cached: int = 0, table: list[int] | None = None) -> list[int]:
    """A sequence's table after its prompt was computed in chunks."""
    table = [] if table is None else table
    assert pages.grow(table, len(tokens))
    for start in range(num_cached, len(tokens), CHUNK):
        assert pages.advance(table, History(tokens), start, min(start + CHUNK, len(tokens)))
    return table


def test_a_window_moves_on_with_as_many_pages_as_it_had():
    pages, table, tokens = manager(), [], list(range(40))
    pages.grow(table, 40)
    assert (runs_with_a_page(table, 0), runs_with_a_page(table)) == (list(range(10)), [0, 1, 2, 3])
    used = pages.num_used
    for start, runs in ((0, [0, 1, 2, 3]), (8, [0, 1, 2, 3]), (16, [2, 3, 4, 5]), (24, [4, 5, 6, 7]), (32, [6, 7, 8, 9])):
        assert pages.advance(table, History(tokens), start, start + 8)
        assert runs_with_a_page(table) == runs
        assert pages.num_used == used
    pages.release_outside_window(table, 40)
    assert runs_with_a_page(table) == [8, 9]
    assert runs_with_a_page(table, 0) == list(range(10))
    pages.free(table)
    assert pages.num_used == 0


def test_what_was_left_behind_is_found_by_whoever_ends_there():
    pages, tokens = manager(), list(range(40))
    table = compute(pages, tokens)
    pages.insert(table, History(tokens), 40)
    pages.free(table)
    found: list[int] = []
    assert pages.match_prefix(found, History([*tokens[:21], 99, 99, 99]), 24) == 20
    assert (runs_with_a_page(found, 0), runs_with_a_page(found)) == ([0, 1, 2, 3, 4], [3, 4]), (
        "from the first token that the next one attends to"
    )
    pages.free(found)


def test_a_pool_for_one_context_holds_it_whatever_of_it_is_cached():
    spec = replace(SPEC, spans=(Span(window=6),))
    pages, tokens = manager(spec.max_pages(40, CHUNK), spec), list(range(40))
    assert pages.num_pages == spec.max_pages(40, CHUNK) < spec.blocks_for(40)
    for num_known in (0, 4, 8, 12):
        table = compute(pages, tokens[:num_known])
        pages.insert(table, History(tokens), num_known)
        pages.free(table)
        found: list[int] = []
        assert pages.match_prefix(found, History(tokens), 39) == num_known
        assert compute(pages, tokens, num_known, found) is found
        pages.free(found)
        pages.forget()


def test_a_prefix_ends_where_its_window_is_still_known():
    pages, tokens = manager(26), list(range(40))
    table = compute(pages, tokens)
    pages.insert(table, History(tokens), 40)
    pages.free(table)
    assert pages.num_cached == 20
    other = compute(pages, list(range(100, 124)))  # 6 runs need 10 pages: there are 6, so 4 are evicted
    found: list[int] = []
    assert pages.match_prefix(found, History(tokens), 40) == 40, "pages of a window's past went, by age, and none at its end"
    pages.free(found)
    assert pages.match_prefix(found, History(tokens), 12) == 0, "there the window's pages are gone"
    pages.free(other)
    assert compute(pages, list(range(200, 240)))


def test_all_that_nobody_reads_can_be_had():
    pages, tokens = manager(20), list(range(40))
    table = compute(pages, tokens)
    pages.insert(table, History(tokens), 40)
    pages.free(table)
    assert pages.num_free == 20
    for _ in range(3):
        table = compute(pages, tokens)
        pages.insert(table, History(tokens), 40)
        first: list[int] = []
        assert pages.match_prefix(first, History(tokens), 39) == 36
        pages.free(first)
        pages.free(table)
        assert pages.num_free == 20
    pages.forget()
    assert pages.num_cached == 0
    assert pages._cache is not None
    assert not pages._cache._roots


def test_going_on_takes_no_more_than_there_is():
    pages, tokens = manager(16), list(range(40))
    table: list[int] = []
    assert pages.grow(table, 40)
    reader: list[int] = []
    assert pages.advance(table, History(tokens), 0, 8)
    pages.insert(table, History(tokens), 8)
    assert pages.match_prefix(reader, History(tokens), 8) == 8  # holds the window's first two pages, too
    others: list[int] = []
    assert pages.grow(others, 4)
    assert pages.num_free == 0
    assert pages.advance(table, History(tokens), 8, 16)
    assert not pages.advance(table, History(tokens), 16, 32), "what it left behind is another's still"
    assert runs_with_a_page(table) == [2, 3]
    pages.free(others)
    pages.free(reader)
    assert pages.advance(table, History(tokens), 16, 32)
    assert runs_with_a_page(table)[-1] >= 7


def test_two_that_compute_the_same_keep_one_copy_of_what_lasts():
    pages, tokens = manager(60), list(range(24))
    first, second = compute(pages, tokens), compute(pages, tokens)
    pages.insert(first, History(tokens), 24)
    pages.insert(second, History(tokens), 24)
    assert first[0::2] == second[0::2]
    assert [page for page in first[1::2] if page in second[1::2]] in ([], [NULL_PAGE] * 2, [NULL_PAGE] * 3, [NULL_PAGE] * 4)
    pages.free(first)
    pages.free(second)
    assert pages.num_used == 0
    assert pages.num_free == 60


def test_a_table_that_is_filled_from_elsewhere_has_pages_from_there_on():
    pages, table, tokens = manager(), [], list(range(40))
    assert pages.grow(table, 40, filled=33)
    assert runs_with_a_page(table) == [7, 8, 9]
    pages.free(table)
    assert pages.grow(table, 40)
    pages.begin_anew(table, History(tokens), 0, 33)
    assert runs_with_a_page(table) == [7, 8, 9]
    pages.free(table)
    assert pages.num_used == 0


def test_where_every_group_is_bounded_a_context_has_no_end():
    spec = PageSpec(1, 1, 4, 4, 4, (Span(chunk=8),))
    pages, table = manager(6, spec), []
    tokens = list(range(4000))
    assert pages.grow(table, 4000)
    for start in range(0, 4000, CHUNK):
        assert pages.advance(table, History(tokens), start, start + CHUNK)
        assert pages.num_used <= 5
    pages.insert(table, History(tokens), 4000)
    pages.free(table)
    pages.forget()
    assert pages._cache is not None
    assert not pages._cache._roots, "no run is left that has no pages"
