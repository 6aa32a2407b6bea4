"""A HandOff as bytes, for another process or machine. Imports no JAX.

    magic "JXHO" | version, uint16 | checksum of all that follows, uint32 | length of the header, uint32
    header: a JSON object, ASCII
    token ids, int32 each | page numbers, int32 each | digests of whole blocks, 16 bytes each

All integers are little-endian; the header has the counts. Times go as durations: clocks differ. What a role keeps of
a sequence (slots, page tables of its own, the detokenizer) stays where it is. Nothing here runs code of the sender's,
as pickle would.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from jaxinfer.kv_transfer.geometry import geometry_fields, read_geometry
from jaxinfer.kv_transfer.handoff import HandOff, HandOffError, HandOffState
from jaxinfer.request import RequestContext, RequestError, SamplingParams
from jaxinfer.segments import PrefilledSegment, Prompt, Segment, TokenSegment
from jaxinfer.sequence import Meter, OutputProgress, Request
from jaxinfer.sequence import Sequence as RunningSequence

MAGIC, VERSION = b"JXHO", 3
_PREFIX = struct.Struct("<4sHII")
_DIGEST_BYTES = 16
_PARAMS = tuple(field.name for field in fields(SamplingParams) if field.name != "logit_bias")

# Of a sequence whose first output tokens were answered elsewhere; see `engine.output.output_progress`.
ResumeOutput = Callable[[SamplingParams, Sequence[int]], OutputProgress]


def to_bytes(handoff: HandOff, now: float) -> bytes:
    """`now`: seconds, of the clock that the request's times are of."""
    digests = handoff.digests()
    header = {
        **_sequence_fields(handoff.sequence, now),
        "geometry": geometry_fields(handoff.geometry),
        "num_tokens": handoff.num_tokens,
        "num_ready": handoff.num_ready,
        "num_received": handoff.num_received,
        "state": handoff.state.value,
        "counts": [len(handoff.sequence.token_ids), len(handoff.pages), len(digests)],
    }
    text = json.dumps(header, allow_nan=False).encode("ascii")
    body = b"".join([text, _integers(handoff.sequence.token_ids), _integers(handoff.pages), *digests])
    return _PREFIX.pack(MAGIC, VERSION, zlib.crc32(body), len(text)) + body


def from_bytes(data: bytes, now: float, resume_output: ResumeOutput) -> HandOff:
    """The hand-off as its receiver has it, with a `Sequence` of its own. Raises `HandOffError` for bytes that are
    damaged, of another version, or of tokens that don't have the digests that came with them."""
    if len(data) < _PREFIX.size or data[:4] != MAGIC:
        raise HandOffError(f"these {len(data)} bytes are no hand-off: they don't begin with {MAGIC!r}")
    _, version, checksum, header_size = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise HandOffError(f"the hand-off is of version {version}, this side reads {VERSION}: run the same release on both")
    body = data[_PREFIX.size :]
    if zlib.crc32(body) != checksum:
        raise HandOffError("the hand-off was damaged on its way: its checksum differs")
    try:
        handoff, digests = _read(json.loads(body[:header_size]), body[header_size:], now, resume_output)
    except (KeyError, TypeError, ValueError, IndexError, struct.error, RequestError) as error:
        raise HandOffError(f"the hand-off can't be read: {type(error).__name__}: {error}") from error
    if handoff.digests() != digests:
        raise HandOffError("the hand-off's digests are not those of its tokens")
    return handoff


def _sequence_fields(sequence: RunningSequence, now: float) -> dict[str, Any]:
    request, context, meter = sequence.request, sequence.context, sequence.meter
    return {
        "request_id": request.request_id,
        "age_seconds": now - request.arrival_time,
        "params": {name: value for name, value in asdict(request.params).items() if name in _PARAMS},
        "logit_bias": list(request.params.logit_bias.items()),
        "context": [context.tenant, context.namespace, context.session, context.priority],
        "seconds_left": None if context.deadline is None else context.deadline - now,
        "index": sequence.index,
        "order": sequence.order,
        "seed": sequence.seed,
        "end_tokens": sorted(sequence.end_tokens),
        "max_tokens": sequence.max_tokens,
        "bad_words": sequence.bad_words,
        "needs_history": sequence.needs_history,
        "level": sequence.level,
        "passed_over_seconds": sequence.passed_over_seconds,
        "meter": [meter.queue_seconds, meter.prefill_seconds, meter.decode_seconds],
        "segments": [[len(segment.token_ids), segment.digest.hex()] for segment in sequence.prompt.segments],
    }


def _read(header: dict[str, Any], arrays: bytes, now: float, resume_output: ResumeOutput) -> tuple[HandOff, list[bytes]]:
    num_tokens, num_pages, num_digests = header["counts"]
    sizes = [4 * num_tokens, 4 * num_pages, _DIGEST_BYTES * num_digests]
    if sum(sizes) != len(arrays):
        raise ValueError(f"its arrays have {len(arrays)} bytes, its header says {sum(sizes)}")
    token_ids = list(struct.unpack_from(f"<{num_tokens}i", arrays))
    pages = list(struct.unpack_from(f"<{num_pages}i", arrays, sizes[0]))
    digests = [arrays[at : at + _DIGEST_BYTES] for at in range(sizes[0] + sizes[1], len(arrays), _DIGEST_BYTES)]
    handoff = HandOff(
        _read_sequence(header, token_ids, now, resume_output),
        read_geometry(header["geometry"]),
        pages,
        header["num_tokens"],
        header["num_ready"],
        header["num_received"],
        HandOffState(header["state"]),
    )
    return handoff, digests


def _read_sequence(header: dict[str, Any], token_ids: list[int], now: float, resume_output: ResumeOutput) -> RunningSequence:
    prompt, seconds_left = _read_prompt(header["segments"], token_ids), header["seconds_left"]
    params = SamplingParams(**header["params"], logit_bias=dict(header["logit_bias"]))
    if params.structured_outputs is not None:
        raise ValueError("structured outputs are followed by the engine that answers: give it the request with its output tokens")
    deadline = None if seconds_left is None else now + seconds_left
    tenant, namespace, session, priority = header["context"]
    context = RequestContext(tenant, namespace, session, priority, deadline)
    return RunningSequence(
        Request(header["request_id"], prompt, params, now - header["age_seconds"], context),
        header["index"],
        header["order"],
        header["seed"],
        frozenset(header["end_tokens"]),
        header["max_tokens"],
        resume_output(params, token_ids[len(prompt) :]),
        token_ids,
        Meter(*header["meter"]),
        tuple(tuple(word) for word in header["bad_words"]),
        header["needs_history"],
        header["level"],
        header["passed_over_seconds"],
    )


def _read_prompt(segments: list[tuple[int, str]], token_ids: list[int]) -> Prompt:
    """Whose segments are the first of these tokens. What is beside their ids stayed where it was prefilled."""
    tokens, found, start = np.array(token_ids, np.int32), list[Segment](), 0
    for length, digest in segments:
        part = tokens[start : start + length]
        found.append(PrefilledSegment(part, bytes.fromhex(digest)) if digest else TokenSegment(part))
        start += length
    if min((length for length, _ in segments), default=0) <= 0 or start > len(token_ids):
        raise ValueError(f"its prompt has {start} of {len(token_ids)} tokens")
    return Prompt(tuple(found))


def _integers(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)
