"""What blocks are known by: token ids, and what a prompt's segments say beside them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.kv_cache.block_keys import block_keys, digests
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.segments import Segment
from tests.sequences import History, Picture, text

SIZE = 4


def keys(*segments: Segment, output: tuple[int, ...] = ()) -> list[bytes]:
    history = History([*itertools.chain(*[segment.token_ids.tolist() for segment in segments]), *output], segments=segments)
    return list(block_keys(history, SIZE, len(history.token_ids) // SIZE))


def test_blocks_of_token_ids_have_the_digests_that_files_of_earlier_releases_have():
    history = History(range(1000, 1032))
    assert [digest.hex() for digest in digests("tenant", block_keys(history, 16, 2))] == [
        "039e6d91313abf93007a9252d20c2fb6",
        "5f13f1b208dba5d3f2d10977cf6126e8",
    ]


def test_token_ids_are_named_alike_however_they_are_divided():
    whole = keys(text(range(20)))
    assert keys(text(range(7)), text(range(7, 20))) == keys(text(range(11)), output=tuple(range(11, 20))) == whole
    assert b"".join(whole) == np.arange(20, dtype=np.int32).tobytes()


def test_the_same_token_ids_with_another_picture_are_other_blocks():
    before, after = text(range(6)), text(range(9))
    cat, dog = keys(before, Picture(5, b"cat"), after), keys(before, Picture(5, b"dog"), after)
    assert [one == other for one, other in zip(cat, dog, strict=True)] == [True, False, False, True, True]
    assert keys(before, Picture(5, b"cat"), after) == cat
    assert digests("", cat)[0] == digests("", dog)[0]
    assert not set(digests("", cat)[1:]) & set(digests("", dog)), "every later block follows another picture"
    assert keys(before, text([Picture.ID] * 5), after) not in (cat, dog), "nor is it its placeholders"


def test_pictures_are_told_apart_by_place():
    one = keys(text([Picture.ID]), Picture(5, b"cat"), text(range(6)))
    assert keys(Picture(5, b"cat"), text([Picture.ID, *range(6)]))[0] != one[0], "a text may spell placeholders"
    assert keys(Picture(2, b"cat"), Picture(2, b"dog")) != keys(Picture(2, b"dog"), Picture(2, b"cat"))
    assert keys(Picture(1, b"cat"), Picture(3, b"cat")) != keys(Picture(2, b"cat"), Picture(2, b"cat"))
    assert keys(Picture(2, b"a"), Picture(2, b"bc")) != keys(Picture(2, b"ab"), Picture(2, b"c"))


SEGMENTS = st.lists(
    st.lists(st.sampled_from([1, Picture.ID]), min_size=1, max_size=5).map(text)
    | st.builds(Picture, st.integers(1, 9), st.sampled_from([b"cat", b"dog"])),
    max_size=5,
)


def content(segments: list[Segment]) -> list[tuple[int, bytes, int]]:
    """Of each position its token id, the picture that it is part of, and which part of it; one by one."""
    return [
        (token, segment.digest, place if segment.digest else -1)
        for segment in segments
        for place, token in enumerate(segment.token_ids.tolist())
    ]


@given(first=SEGMENTS, second=SEGMENTS)
def test_blocks_are_named_alike_if_their_content_is(first: list[Segment], second: list[Segment]) -> None:
    one, other = content(first), content(second)
    for number, (key, other_key) in enumerate(zip(keys(*first), keys(*second), strict=False)):
        block = slice(number * SIZE, (number + 1) * SIZE)
        assert (key == other_key) == (one[block] == other[block])


def test_pages_are_shared_with_the_same_picture_only():
    pages = KVManager(PageSpec(1, 1, 1, SIZE, 4), 20)
    ids = [*range(6), *[Picture.ID] * 5, *range(9)]
    cat, dog = (History(ids, segments=(text(range(6)), Picture(5, name), text(range(9)))) for name in (b"cat", b"dog"))
    table: list[int] = []
    assert pages.grow(table, 20)
    pages.insert(table, cat, 20)
    pages.free(table)
    for history, num_found in ((cat, 20), (dog, 4), (History(ids), 4)):
        found: list[int] = []
        assert pages.match_prefix(found, history, 20) == num_found
        pages.free(found)
        assert pages.missing(history, 20)[0] == num_found // SIZE
