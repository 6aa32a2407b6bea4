"""What later requests find of earlier ones, engine and all, over make-believe devices: which tokens are computed, which pages move."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.request import RequestContext
from jaxinfer.segments import Prompt
from jaxinfer.sequence import SequenceState
from tests.engine.fake_device import sequences_of
from tests.engine.page_audit import assert_all_free
from tests.engine.simulated import Driver, endless, recorded_chunks
from tests.sequences import Picture, text

PAGE = 8


def pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def whole(num_tokens: int) -> int:
    """Tokens in whole pages."""
    return num_tokens // PAGE * PAGE


def prompt(length: int, start: int = 0) -> list[int]:
    """Two prompts of different starts differ from the first page on."""
    return [(start * 7 + i) % 250 for i in range(length)]


def assert_all_served(run: Driver) -> None:
    run.finish()
    run.check_tokens()
    assert_all_free(run.engine)


@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize("chunk_size", [64, 32])
@pytest.mark.parametrize(
    ("num_prompt", "num_answer", "num_more"), [(100, 50, 30), (96, 33, 1), (95, 2, 7), (64, 1, 64), (7, 1, 1), (8, 9, 8), (7, 2, 1)]
)
def test_each_turn_finds_the_prompts_and_answers_before_it(clock, meshes, chunk_size, num_prompt, num_answer, num_more):
    run = Driver(clock, meshes, prefill_chunk_size=chunk_size, prefill_buckets=(32, 64))
    asked, found, moved = prompt(num_prompt), 0, 0
    in_prefill = in_decode = 0  # whole pages of the conversation that each mesh has, in tokens
    for turn in range(3):
        stats = run.engine.stats
        num_cached, num_moved = stats.num_cached_tokens, stats.num_pages_moved
        with recorded_chunks(run.engine) as chunks:
            output = run.ask(f"turn {turn}", asked, endless(num_answer))
        assert output.cached_tokens == stats.num_cached_tokens - num_cached == found
        assert chunks[0].start == found
        assert sum(chunk.length for chunk in chunks) == len(asked) - found
        # Each page once: those that decode alone has come back, and what it has not goes there. An answer of a token needs no decoding.
        moved = (found - min(in_prefill, found)) // PAGE
        moved += pages(len(asked)) - in_decode // PAGE if num_answer > 1 else 0
        assert stats.num_pages_moved - num_moved == (moved if meshes == "two" else 0)
        in_prefill, in_decode = whole(len(asked)), whole(len(asked) + num_answer - 1) if num_answer > 1 else 0
        answer = run.tokens(f"turn {turn}")
        assert len(answer) == num_answer
        found = max(in_prefill, in_decode)
        asked = asked + answer + prompt(num_more, turn + 1)
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_a_long_conversations_next_turn_computes_only_its_tail(clock, meshes):
    run = Driver(clock, meshes, num_pages=400, max_model_len=2000, prefill_chunk_size=512, prefill_buckets=(32, 512))
    first = prompt(1400)
    run.ask("one", first, endless(60))
    with recorded_chunks(run.engine) as chunks:
        run.ask("two", first + run.tokens("one") + prompt(40, 1), endless(5))
    assert [(chunk.start, chunk.length) for chunk in chunks] == [(1456, 44)]
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_the_same_prompt_again_is_computed_from_its_last_whole_page_on(clock, meshes):
    run = Driver(clock, meshes)
    for length in (1, 8, 9, 63, 64, 65, 200):
        for time in range(2):
            output = run.ask(f"{length} {time}", prompt(length, length), endless(3))
            assert output.cached_tokens == (whole(length - 1) if time else 0), "the last token is computed: the answer is sampled from it"
    assert_all_served(run)


def test_cached_tokens_are_told_once_for_each_sequence_and_counted_once(clock):
    run = Driver(clock)
    run.ask("first", prompt(100), endless(3, n=3))
    run.ask("again", prompt(100), endless(3, n=3))
    of_again = [delta for delta in run.deltas if delta.request_id == "again"]
    assert [delta.cached_tokens for delta in run.deltas if delta.request_id == "first"] == [0] * 9
    firsts = {index: next(delta for delta in of_again if delta.index == index) for index in range(3)}
    assert [delta.cached_tokens for delta in of_again] == [96 * (delta is firsts[delta.index]) for delta in of_again]
    assert run.engine.stats.num_cached_tokens == 96
    assert_all_served(run)


def test_pages_come_back_from_the_decode_mesh_once_for_all_that_start_from_them(clock):
    run = Driver(clock, "two")
    run.ask("one", prompt(100), endless(50))
    num_moved = run.engine.stats.num_pages_moved
    for name in "ab":
        run.add(name, prompt(100) + run.tokens("one") + prompt(60, ord(name)), endless(5))
    run.finish()
    assert [run.outputs[name].cached_tokens for name in "ab"] == [144, 144]
    assert run.engine.stats.num_pages_moved - num_moved == (18 - 12) + 2 * (pages(210) - 18)
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize("goes", ["aborted", "preempted"])
def test_what_was_computed_of_a_prompt_is_found_though_it_never_ended(clock, meshes, goes):
    urgent = RequestContext(priority=-10)
    run = Driver(clock, meshes, max_batch_size=1)
    with recorded_chunks(run.engine) as chunks:
        run.add("cut", prompt(300), endless(5))
        run.step()
        run.step()
        if goes == "aborted":
            run.engine.abort("cut")
            del run.outputs["cut"]
            run.ask("again", prompt(300), endless(5))
            assert run.outputs["again"].cached_tokens == 128
        else:
            run.ask("urgent", prompt(20, 1), endless(5), urgent)
            run.finish()
            assert run.outputs["cut"].cached_tokens == 0, "it found what it had computed itself"
    assert sum(chunk.length for chunk in chunks if chunk.sequence.num_prompt == 300) == 300
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_a_half_computed_answer_is_found_by_whoever_asks_the_same(clock, meshes):
    run = Driver(clock, meshes)
    run.add("cut", prompt(50), endless(100))
    while len(run.tokens("cut")) < 40:
        run.step()
    run.engine.abort("cut")
    tokens = run.outputs.pop("cut").outputs[0].token_ids
    cached = run.ask("again", prompt(50) + tokens + [1], endless(5)).cached_tokens
    assert cached == whole(50 + len(tokens) - 1)
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_who_computes_the_same_at_the_same_time_shares_the_pages_from_then_on(clock, meshes):
    run = Driver(clock, meshes, prefill_chunk_size=256, prefill_buckets=(256,))
    for name in "abc":
        run.add(name, prompt(60), endless(40))
    while not all(sequence.state is SequenceState.RUNNING for sequence in sequences_of(run.engine)):
        run.step()
    tables = [sequence.decode.pages for sequence in sequences_of(run.engine)]
    assert tables[0][:7] == tables[1][:7] == tables[2][:7]
    assert run.engine.stats.decode_pages_used == 7 + sum(len(table) - 7 for table in tables)
    assert [run.outputs[name].cached_tokens for name in "abc"] == [0, 0, 0]
    assert_all_served(run)


# Who may find what.


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_two_tenants_in_namespaces_of_their_own_see_nothing_of_each_other(clock, meshes):
    run = Driver(clock, meshes)
    ours, theirs = (RequestContext(tenant=name, namespace=name) for name in ("ours", "theirs"))
    times, moved = {}, {}
    for number, context in enumerate((ours, theirs, ours, theirs)):
        started, num_moved = clock.now, run.engine.stats.num_pages_moved
        output = run.ask(f"{number}", prompt(100), endless(20), context)
        times[number], moved[number] = clock.now - started, run.engine.stats.num_pages_moved - num_moved
        assert output.cached_tokens == (0 if number < 2 else 96)
    assert times[1] == pytest.approx(times[0], abs=1e-4), "not even by the time it takes"
    assert times[2] < times[1] - 0.05
    assert moved[0] == moved[1]
    assert run.tokens("0") == run.tokens("1")
    assert_all_served(run)


def test_tenants_of_one_namespace_share(clock):
    run = Driver(clock)
    for number, tenant in enumerate("ab"):
        cached = run.ask(f"{number}", prompt(100), endless(2), RequestContext(tenant=tenant, namespace="all")).cached_tokens
        assert cached == 96 * number


def test_a_namespace_is_not_part_of_the_text(clock):
    """Neither a name that spells tokens nor a prompt that spells a name leads into another's."""
    run = Driver(clock)
    run.ask("a", [97] * 8 + prompt(40), endless(2), RequestContext(namespace=""))
    assert run.ask("b", prompt(40), endless(2), RequestContext(namespace="a" * 8)).cached_tokens == 0
    assert run.ask("c", [97] * 8 + prompt(40), endless(2), RequestContext(namespace="\x00")).cached_tokens == 0


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_the_same_placeholders_are_found_only_with_the_same_picture(clock, meshes):
    run = Driver(clock, meshes)
    asked = {
        name: Prompt((text(prompt(20)), Picture(40, digest), text(prompt(30))))
        for name, digest in (("cat", b"1"), ("dog", b"2"), ("cat again", b"1"), ("dog again", b"2"))
    }
    found = {name: run.ask(name, run.engine.validate(given, endless(9)), endless(9)).cached_tokens for name, given in asked.items()}
    assert found == {"cat": 0, "dog": whole(20), "cat again": whole(89), "dog again": whole(89)}
    answer = run.tokens("cat")
    follow_up = Prompt((*asked["cat"].segments, text([*answer, 1, 2, 3])))
    assert run.ask("go on", follow_up, endless(2)).cached_tokens == whole(90 + 8), "after a picture answers are found, too"
    assert_all_served(run)


# Which pages stay.


def press(run: Driver, name: str, num_requests: int = 20) -> None:
    """More strangers than the pool holds."""
    for number in range(num_requests):
        run.ask(f"{name} {number}", [*prompt(4, number), *name.encode(), *prompt(90)], endless(3))


@pytest.mark.parametrize("meshes", ["shared", "two"])
@pytest.mark.parametrize(("session", "seconds", "found"), [("chat", 0, True), (None, 0, False), ("chat", 300, False)])
def test_a_sessions_pages_stay_warm_for_its_time(clock, meshes, session, seconds, found):
    run = Driver(clock, meshes, num_pages=60, session_seconds=300.0)
    context = RequestContext(session=session)
    run.ask("one", prompt(160), endless(40), context)
    clock.now += seconds
    press(run, "strangers")
    output = run.ask("two", prompt(160) + run.tokens("one") + [1, 2, 3], endless(10), context)
    assert output.cached_tokens == (whole(199) if found else 0)
    assert_all_served(run)


def test_sessions_are_evicted_too_when_nothing_else_is_left(clock):
    run = Driver(clock, num_pages=60, max_model_len=60 * PAGE)
    for number in range(5):
        run.ask(f"{number}", prompt(160, number), endless(8), RequestContext(session=f"{number}"))
    cached = [run.ask(f"again {number}", prompt(160, number), endless(1)).cached_tokens for number in (4, 3, 1)]
    assert cached == [152, 152, 0], "the pool has room for three"
    run.ask("all", prompt(400, 99), endless(60 * PAGE - 400))
    assert_all_served(run)


def test_pages_in_use_are_never_taken_from_under_a_request(clock):
    """A prefix that running requests read is the oldest, and stays while others come and go."""
    run = Driver(clock, num_pages=60)
    run.ask("first", prompt(80), endless(1))
    run.add("reader", [*prompt(80), 1], endless(200))
    while not run.tokens("reader"):
        run.step()
    for number in range(30):
        run.ask(f"{number}", prompt(150, number + 1), endless(2))
    assert run.ask("again", [*prompt(80), 2], endless(1)).cached_tokens == 80
    assert_all_served(run)


@pytest.mark.parametrize("meshes", ["shared", "two"])
def test_a_pool_full_of_kept_pages_serves_just_as_an_empty_one(clock, meshes):
    """At any load: the same tokens at the same times as without a cache, where nobody finds anything."""
    told = []
    for prefix_cache in (True, False):
        random = np.random.default_rng(5)
        clock.now = 1000.0
        run = Driver(clock, meshes, num_pages=40, prefix_cache=prefix_cache, max_batch_size=8)
        for number in range(120):
            length = int(random.choice([0, 40, 96, 296]))  # and one, so that answers take no further pages
            run.add(f"{number}", [number, *random.integers(0, 200, length).tolist()], endless(int(random.integers(1, 9))))
            for _ in range(int(random.integers(0, 5))):
                run.step()
        assert_all_served(run)
        told.append((run.deltas, clock.now))
        if prefix_cache:
            assert run.engine._components.prefill.manager.num_cached > 35
    assert told[0] == told[1]


def test_without_a_prefix_cache_nothing_is_kept_and_nothing_found(clock):
    run = Driver(clock, prefix_cache=False)
    for number in range(2):
        assert run.ask(f"{number}", prompt(100), endless(20)).cached_tokens == 0
        assert run.engine.stats.prefill_pages_cached == 0
    run.ask("n", prompt(100), endless(20, n=3))
    assert_all_served(run)


def test_a_prompt_that_only_is_computed_is_found(clock):
    """As an embedding's or a warm-up's: no token is asked for."""
    run = Driver(clock)
    run.ask("warm", prompt(100), endless(0))
    assert run.ask("a", prompt(100), endless(5)).cached_tokens == 96
    assert_all_served(run)
