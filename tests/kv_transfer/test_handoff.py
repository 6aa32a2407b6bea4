"""HandOff: its states in order, and its bytes read back. Damage of any kind is an error that says so."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.output import output_progress
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_transfer import handoff_bytes
from jaxinfer.kv_transfer.handoff import HandOff, HandOffError, HandOffState
from jaxinfer.request import RequestContext, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.sequence import Meter, OutputProgress, Request, Sequence
from pallas_kernels.span import Span
from tests.sequences import Picture, text
from tests.server.fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()
NOW = 1000.0
TOKEN = st.integers(0, TOKENIZER.vocab_size - 1)
SECONDS = st.floats(0.0, 1e6)
TEXT = st.text(st.characters(categories=["L", "N", "P", "S", "Cs"]), min_size=1, max_size=8).filter(str.strip)


def resume(params: SamplingParams, output_ids: list[int]) -> OutputProgress:
    return output_progress(TOKENIZER, params, output_ids)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    most = draw(st.integers(0, 50))
    return SamplingParams(
        temperature=draw(st.floats(0.0, 100.0)),
        top_k=draw(st.integers(0, 2**31 - 1)),
        top_p=draw(st.floats(0.0, 1.0, exclude_min=True)),
        min_p=draw(st.floats(0.0, 1.0)),
        seed=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        repetition_penalty=draw(st.floats(0.1, 100.0)),
        presence_penalty=draw(st.floats(-2.0, 2.0)),
        frequency_penalty=draw(st.floats(-2.0, 2.0)),
        logit_bias=draw(st.dictionaries(TOKEN, st.floats(-100.0, 100.0), max_size=3)),
        stop=tuple(draw(st.lists(TEXT, max_size=3))),
        stop_token_ids=tuple(draw(st.lists(TOKEN, max_size=3))),
        max_tokens=draw(st.none() | st.just(most)),
        min_tokens=draw(st.integers(0, most)),
        ignore_eos=draw(st.booleans()),
        n=draw(st.integers(1, 128)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        echo=draw(st.booleans()),
        allowed_token_ids=draw(st.none() | st.lists(TOKEN, min_size=1, max_size=3).map(tuple)),
        bad_words=tuple(draw(st.lists(TEXT, max_size=2))),
        logprob_token_ids=tuple(draw(st.lists(TOKEN, max_size=2))),
        skip_special_tokens=draw(st.booleans()),
        include_stop_str_in_output=draw(st.booleans()),
        truncate_prompt_tokens=draw(st.none() | st.just(-1) | st.integers(1, 99)),
    )


SEGMENT = st.lists(TOKEN, min_size=1, max_size=30).map(text) | st.builds(Picture, st.integers(1, 20), st.binary(min_size=1, max_size=20))


@st.composite
def handoffs(draw: st.DrawFn) -> HandOff:
    segments = draw(st.lists(SEGMENT, min_size=1, max_size=3).map(tuple))
    prompt, output = Prompt(segments), draw(st.lists(TOKEN, max_size=10))
    context = RequestContext(
        draw(st.text(max_size=4)),
        draw(st.text(max_size=4)),
        draw(st.none() | st.text(max_size=4)),
        draw(st.integers(-(2**31), 2**31 - 1)),
        draw(st.none() | SECONDS),
    )
    asked = draw(params())
    words = draw(st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple))
    sequence = Sequence(
        Request(draw(TEXT), prompt, asked, draw(SECONDS), context),
        draw(st.integers(0, 127)),
        draw(st.integers(0, 2**40)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.frozensets(TOKEN, max_size=3)),
        draw(st.integers(0, 100)),
        resume(asked, output),
        [*prompt.token_ids.tolist(), *output],
        Meter(draw(SECONDS), draw(SECONDS), draw(SECONDS)),
        words,
        draw(st.booleans()),
        draw(st.none() | st.integers(-5, 20)),
        draw(SECONDS),
    )
    num_tokens = draw(st.integers(0, len(prompt) + len(output)))
    spans = draw(st.lists(st.sampled_from([Span(), Span(window=9), Span(chunk=64)]), min_size=1, max_size=3).map(tuple))
    geometry = PageSpec(2, 3, 64, draw(st.sampled_from([1, 4, 16])), 2, spans, draw(st.integers(1, 2)))
    pages = draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    num_ready = draw(st.integers(0, num_tokens))
    return HandOff(sequence, geometry, pages, num_tokens, num_ready, draw(st.integers(0, num_ready)), draw(st.sampled_from(HandOffState)))


@settings(deadline=None)
@given(handoff=handoffs(), later=SECONDS)
def test_bytes_give_the_same_hand_off_at_another_clocks_time(handoff: HandOff, later: float) -> None:
    data = handoff_bytes.to_bytes(handoff, NOW)
    received = handoff_bytes.from_bytes(data, NOW + later, resume)
    for name in ("geometry", "pages", "num_tokens", "num_ready", "num_received", "state"):
        assert getattr(received, name) == getattr(handoff, name), name
    assert received.digests() == handoff.digests()
    sent, own = handoff.sequence, received.sequence
    names = ("index", "order", "seed", "end_tokens", "max_tokens", "token_ids", "meter", "bad_words", "needs_history", "level")
    for name in (*names, "passed_over_seconds", "params", "num_prompt", "max_total_tokens"):
        assert getattr(own, name) == getattr(sent, name), name
    assert own.prompt.token_ids.tolist() == sent.prompt.token_ids.tolist()
    assert own.request.request_id == sent.request.request_id
    assert dataclasses.replace(own.context, deadline=None) == dataclasses.replace(sent.context, deadline=None)
    assert own.request.arrival_time - later == pytest.approx(sent.request.arrival_time, abs=1e-6)
    assert (own.context.deadline is None) == (sent.context.deadline is None)
    if sent.context.deadline is not None:
        assert own.context.deadline is not None
        assert own.context.deadline - later == pytest.approx(sent.context.deadline, abs=1e-6)
    assert own.output.is_started == bool(sent.num_output)
    assert (own.prefill.pages, own.decode.pages, own.decode.slot, own.epoch) == ([], [], -1, 0), "each side has its own"
    assert handoff_bytes.to_bytes(received, NOW + later)[:6] == data[:6]


def small() -> HandOff:
    request = Request("r", Prompt.of_tokens([5, 6, 7]), SamplingParams(seed=1), NOW)
    output = resume(request.params, [8])
    sequence = Sequence(request, 0, 0, 1, frozenset({257}), 9, output, [5, 6, 7, 8])
    return HandOff(sequence, PageSpec(1, 1, 1, 2, 4), [3, 4], 3, 3)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_damage_anywhere_is_an_error(data: st.DataObject) -> None:
    sent = bytearray(handoff_bytes.to_bytes(small(), NOW))
    if data.draw(st.booleans()):
        sent[data.draw(st.integers(0, len(sent) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del sent[data.draw(st.integers(0, len(sent) - 1)) :]
    with pytest.raises(HandOffError):
        handoff_bytes.from_bytes(bytes(sent), NOW, resume)


def resealed(change: object) -> bytes:
    """A small hand-off's bytes with another header, and the checksum of these."""
    sent = handoff_bytes.to_bytes(small(), NOW)
    *_, size = handoff_bytes._PREFIX.unpack_from(sent)
    body = sent[handoff_bytes._PREFIX.size :]
    header = json.loads(body[:size])
    change(header)  # type: ignore[operator]
    changed = json.dumps(header).encode()
    body = changed + body[size:]
    return handoff_bytes._PREFIX.pack(handoff_bytes.MAGIC, handoff_bytes.VERSION, handoff_bytes.zlib.crc32(body), len(changed)) + body


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.pop("seed"), "KeyError: 'seed'"),
        (lambda header: header["params"].update(temperature=-1.0), "temperature is -1.0"),
        (lambda header: header["params"].update(surprise=1), "surprise"),
        (lambda header: header.update(state="lost"), "'lost'"),
        (lambda header: header.update(segments=[[9, ""]]), "its prompt has 9 of 4 tokens"),
        (lambda header: header.update(counts=[4, 2, 2]), "arrays have 40 bytes, its header says 56"),
        (lambda header: header["context"].__setitem__(1, "another tenant"), "digests are not those of its tokens"),
    ],
)
def test_a_header_that_makes_no_sense_is_an_error_that_names_it(change: object, message: str) -> None:
    with pytest.raises(HandOffError, match=message):
        handoff_bytes.from_bytes(resealed(change), NOW, resume)


def test_another_version_is_named() -> None:
    sent = bytearray(handoff_bytes.to_bytes(small(), NOW))
    sent[4] = 4
    with pytest.raises(HandOffError, match="of version 4, this side reads 3"):
        handoff_bytes.from_bytes(bytes(sent), NOW, resume)


def test_states_follow_one_another_and_an_end_is_an_end() -> None:
    order = [HandOffState.OFFERED, HandOffState.ACCEPTED, HandOffState.TRANSFERRING, HandOffState.COMPLETE]
    allowed = {*itertools.pairwise(order), (HandOffState.TRANSFERRING, HandOffState.TRANSFERRING)}
    allowed |= {(state, HandOffState.CANCELLED) for state in order[:3]}
    for before, after in itertools.product(HandOffState, HandOffState):
        handoff = small()
        handoff.state = before
        if (before, after) in allowed:
            handoff.to(after)
            assert handoff.state is after
        else:
            with pytest.raises(HandOffError, match=f"is {before}: it can't become {after}"):
                handoff.to(after)
    for state in HandOffState:
        handoff = small()
        handoff.state = state
        handoff.cancel()
        assert handoff.state is (state if state is HandOffState.COMPLETE else HandOffState.CANCELLED)


def test_text_goes_on_where_another_engine_stopped() -> None:
    text = "Grüße, Welt"
    ids = TOKENIZER.encode(text)
    whole = output_progress(TOKENIZER, SamplingParams()).detokenizer
    pieces = [whole.add(token) for token in ids]
    for num_sent in range(len(ids) + 1):
        resumed = output_progress(TOKENIZER, SamplingParams(), ids[:num_sent]).detokenizer
        assert [resumed.add(token) for token in ids[num_sent:]] == pieces[num_sent:]
