"""What a replay sends: the trace's shape survives its scaling."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay_trace import Prompts, Scale, pages_of, pick
from jaxinfer.planner.trace import BLOCK, TraceError, TraceRequest, read_trace

TRACE = Path(__file__).parent / "tiny_trace.jsonl"


def common(a, b) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    lines = TRACE.read_text().splitlines()
    (tmp_path / "shuffled.jsonl").write_text("\n".join([*reversed(lines), ""]))
    trace = read_trace(tmp_path / "shuffled.jsonl")
    assert len(trace) == len(lines) == 18
    assert [r.timestamp for r in trace] == sorted(json.loads(line)["timestamp"] for line in lines)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 3}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 3, "hash_ids": [1]}', "1 hashes for 600 tokens"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 0, "hash_ids": [1, 2]}', "output_length"),
        ("[1]", "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(TRACE.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(TraceError, match="line 2") as caught:
        read_trace(path)
    assert words in str(caught.value)
    path.write_text("\n")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(path)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:05.0000000,1025,10
2023-11-16 18:17:03.9799600,4808,10

2023-11-16 18:17:04.0319600,3180,0
"""


def test_azures_traces_are_read_too_and_share_nothing(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE, newline="\r\n")
    trace = read_trace(path)
    assert [(r.input_length, r.output_length) for r in trace] == [(4808, 10), (3180, 1), (1025, 10)]
    assert [round(r.timestamp - trace[0].timestamp) for r in trace] == [0, 52, 1020]
    hashes = [hash_id for request in trace for hash_id in request.hash_ids]
    assert len(set(hashes)) == len(hashes) == 10 + 7 + 3
    scale = Scale.of(1 / 32, 16)
    assert [len(Prompts(scale, 1_000, 31_000).tokens(r)) for r in trace] == [scale.num_prompt(r) for r in trace]
    assert len(pick(trace, 2, "sessions")) == 2
    path.write_text("\ufeffTIMESTAMP,ContextTokens,GeneratedTokens,Extra\n2024-05-10 00:00:00.009930+00:00,2162,5,x\n")
    [request] = read_trace(path)
    assert (request.input_length, request.output_length, len(request.hash_ids)) == (2162, 5, 5)
    assert request.timestamp == pytest.approx(1715299200009.93)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"time,in,out\n1,2,3\n", "first line is neither"),
        (b"hello\n", "first line is neither"),
        (b"\x89PNG\r\n\x1a\n", "no text in UTF-8"),
        (b"", "no requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,5,5\n", "line 2 is no request"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5\n", "line 2 is no request"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,5\n", "line 2 is no request"),
        (b'{"input_length": 5}\n', "line 1 is no request: it has no 'output_length'"),
    ],
)
def test_another_format_is_refused_with_the_names_of_both(tmp_path, content, words):
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(tmp_path / "trace")
    assert "Mooncake's JSON lines, such as" in str(caught.value) and "Azure's CSV with the columns TIMESTAMP,Context" in str(caught.value)


def test_a_row_with_impossible_lengths_is_named(tmp_path):
    (tmp_path / "trace").write_text(AZURE + "2023-11-16 18:17:06,0,5\n")
    with pytest.raises(TraceError, match="line 6 has 0 and 5 tokens: give at least 1 and 0"):
        read_trace(tmp_path / "trace")


@pytest.mark.parametrize("length", [1, 1 / 4, 1 / 32, 1 / 1000, 0.1])
def test_prompts_share_after_scaling_what_they_shared_before(length):
    trace = read_trace(TRACE)
    scale = Scale.of(length, page_size=16)
    assert scale.block_size % 16 == 0 and scale.block_size >= 16
    tokens = [Prompts(scale, 1_000, 31_000).tokens(r) for r in trace]
    assert [len(t) for t in tokens] == [scale.num_prompt(r) for r in trace]
    assert min(t.min() for t in tokens) >= 1_000 and max(t.max() for t in tokens) < 31_000
    for (a, x), (b, y) in itertools.combinations(zip(trace, tokens, strict=True), 2):
        assert common(x, y) == common(a.hash_ids, b.hash_ids) * scale.block_size


def test_lengths_are_scaled_and_partial_blocks_stay_partial():
    scale = Scale.of(1 / 32, page_size=16)
    request = TraceRequest(0, 2 * BLOCK + 256, 330, (0, 1, 2))
    assert scale.num_prompt(request) == 16 + 16 + 8
    assert scale.num_output(request) == 10
    assert scale.num_output(TraceRequest(0, 1, 3, (0,))) == 1
    assert scale.num_prompt(TraceRequest(0, 1, 3, (0,))) == 1
    assert Scale.of(1 / 32, 16, output=1 / 4).num_output(request) == 82
    assert scale.fits(request, 50) and not scale.fits(request, 49)
    assert Scale.of(0.001, page_size=64).block_size == 64


def test_equal_blocks_that_end_early_are_the_beginning_of_the_whole_block():
    prompts = Prompts(Scale.of(1 / 8, 16), 1_000, 31_000)
    whole, part = prompts.tokens(TraceRequest(0, 512, 1, (7,))), prompts.tokens(TraceRequest(0, 100, 1, (7,)))
    assert 0 < len(part) < len(whole) and (whole[: len(part)] == part).all()


def test_another_salt_has_other_tokens_and_the_same_salt_the_same():
    request = TraceRequest(0, 1024, 1, (3, 4))
    one, again, other = (Prompts(Scale.of(1, 16), 1_000, 31_000, salt).tokens(request) for salt in (5, 5, 6))
    assert (one == again).all()
    assert common(one, other) < 3


def test_sessions_are_picked_whole_and_the_first_ones_in_a_row():
    trace = read_trace(TRACE)
    assert pick(trace, 5, "first") == trace[:5]
    chosen = pick(trace, 9, "sessions")
    assert 6 <= len(chosen) <= 9
    assert chosen == [r for r in trace if r in chosen]
    sessions = {r.session for r in chosen}
    assert sum(r.session in sessions for r in trace) == len(chosen)
    assert pick(trace, 100, "sessions") == trace
    with pytest.raises(TraceError, match="pick the first"):
        pick([TraceRequest(0, 9, 1, (1,)) for _ in range(9)], 4, "sessions")


def test_pages_are_equal_where_all_tokens_up_to_their_end_are():
    tokens = np.arange(50, dtype=np.int32)
    other = tokens.copy()
    other[20] = 99
    keys, others = list(pages_of(tokens, 16)), list(pages_of(other, 16))
    assert len(keys) == 3
    assert [a == b for a, b in zip(keys, others, strict=True)] == [True, False, False]
    assert len(list(pages_of(tokens[:48], 16))) == 2  # the last token is always computed
    assert list(pages_of(tokens[:15], 16)) == []
