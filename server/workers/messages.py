"""Requests and their deltas as messages of worker.proto, and back. Imports no JAX."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields

from jaxinfer.engine_access import EngineClosedError
from jaxinfer.kv_cache.block_keys import DIGEST_BYTES
from jaxinfer.kv_cache.events import CacheChange
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.kv_transfer.geometry import geometry_fields
from jaxinfer.kv_transfer.kv_receiver import FirstToken
from jaxinfer.request import DeviceUsage, FinishReason, OutputDelta, RequestContext, RequestError, SamplingParams, TokenLogprob
from server.workers import worker_pb2 as pb

_MOST_DIGESTS = 65536  # of a message: a megabyte, of which gRPC takes four
_DEFAULTS = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}


def params_text(params: SamplingParams) -> str:
    """JSON of the fields that differ from their defaults."""
    given = {name: getattr(params, name) for name in _DEFAULTS if getattr(params, name) != _DEFAULTS[name]}
    if "logit_bias" in given:
        given["logit_bias"] = list(given["logit_bias"].items())
    return json.dumps(given, default=asdict)


def read_params(text: str) -> SamplingParams:
    """Raises `RequestError` and `ValueError` for what is none."""
    given = json.loads(text)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**given)


def geometry_text(spec: PageSpec) -> str:
    """What two workers' pages must agree in but for their size in tokens, as JSON."""
    return json.dumps(geometry_fields(spec), sort_keys=True)


def context_message(context: RequestContext) -> pb.Context:
    """Its deadline as the seconds that are left: clocks differ."""
    left = None if context.deadline is None else context.deadline - time.monotonic()
    return pb.Context(
        tenant=context.tenant, namespace=context.namespace, session=context.session, priority=context.priority, seconds_left=left
    )


def read_context(message: pb.Context) -> RequestContext:
    return RequestContext(
        message.tenant,
        message.namespace,
        message.session if message.HasField("session") else None,
        message.priority,
        time.monotonic() + message.seconds_left if message.HasField("seconds_left") else None,
    )


def delta_message(delta: OutputDelta) -> pb.Delta:
    message = pb.Delta(
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=map(_logprob_message, delta.logprobs),
        finish_reason=delta.finish_reason,
        prompt_logprobs=map(_logprob_message, delta.prompt_logprobs or ()),
        has_prompt_logprobs=delta.prompt_logprobs is not None,
        cached_tokens=delta.cached_tokens,
    )
    if isinstance(delta.stop_reason, int):
        message.stop_token_id = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_text = delta.stop_reason
    if (usage := delta.device_usage) is not None:
        message.usage.CopyFrom(pb.Usage(queue_seconds=usage.queue_seconds, prefill_seconds=usage.prefill_seconds))
        message.usage.decode_seconds = usage.decode_seconds
    return message


def read_delta(message: pb.Delta, request_id: str, index: int) -> OutputDelta:
    """A delta of a request's sequence `index`."""
    stopped_by, usage = message.WhichOneof("stopped_by"), message.usage
    return OutputDelta(
        request_id,
        index,
        message.text,
        tuple(message.token_ids),
        tuple(logprob for logprob in map(_read_logprob, message.logprobs) if logprob is not None),
        FinishReason(message.finish_reason) if message.HasField("finish_reason") else None,
        None if stopped_by is None else getattr(message, stopped_by),
        tuple(map(_read_logprob, message.prompt_logprobs)) if message.has_prompt_logprobs else None,
        message.cached_tokens,
        DeviceUsage(usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds) if message.HasField("usage") else None,
    )


def is_refusal(error: Exception) -> bool:
    """Whether no worker would take the request."""
    return isinstance(error, (RequestError, ValueError)) and not isinstance(error, EngineClosedError)


def refusal_text(error: Exception) -> str:
    return json.dumps({"message": str(error), "param": getattr(error, "param", None), "code": getattr(error, "code", None)})


def read_refusal(text: str) -> RequestError:
    told = json.loads(text)
    return RequestError(told["message"], told["param"], told["code"])


def first_token_message(delta: OutputDelta) -> pb.FirstToken:
    """Of the only delta of a sequence that was prefilled for another engine."""
    usage = delta.device_usage
    return pb.FirstToken(
        token_id=delta.token_ids[0],
        logprob=_logprob_message(delta.logprobs[0]) if delta.logprobs else None,
        prompt_logprobs=map(_logprob_message, delta.prompt_logprobs or ()),
        num_cached=delta.cached_tokens,
        queue_seconds=usage.queue_seconds if usage else 0.0,
        prefill_seconds=usage.prefill_seconds if usage else 0.0,
    )


def read_first_token(message: pb.FirstToken) -> FirstToken:
    return FirstToken(
        message.token_id,
        _read_logprob(message.logprob) if message.HasField("logprob") else None,
        _read_logprobs(message.prompt_logprobs),
        message.num_cached,
        message.queue_seconds,
        message.prefill_seconds,
    )


def cache_messages(change: CacheChange, *, is_stored: bool) -> Iterator[pb.CacheChange]:
    """As many as its size needs: what is too much for one comes after it, as a change of no events."""
    yield pb.CacheChange(
        first=change.first,
        last=change.last,
        inserted=b"".join(change.inserted[:_MOST_DIGESTS]),
        evicted=b"".join(change.evicted),
        is_reset=change.is_reset,
        is_stored=is_stored,
    )
    for start in range(_MOST_DIGESTS, len(change.inserted), _MOST_DIGESTS):
        inserted = b"".join(change.inserted[start : start + _MOST_DIGESTS])
        yield pb.CacheChange(first=change.last + 1, last=change.last, inserted=inserted, is_stored=is_stored)


def read_cache(message: pb.CacheChange) -> CacheChange:
    return CacheChange(message.first, message.last, _split(message.inserted), _split(message.evicted), message.is_reset)


def _split(digests: bytes) -> tuple[bytes, ...]:
    return tuple(digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES))


def _logprob_message(logprob: TokenLogprob | None) -> pb.TokenLogprob:
    if logprob is None:
        return pb.TokenLogprob()
    top_ids, top_logprobs = [token_id for token_id, _ in logprob.top], [value for _, value in logprob.top]
    return pb.TokenLogprob(
        token_id=logprob.token_id, logprob=logprob.logprob, top_token_ids=top_ids, top_logprobs=top_logprobs, rank=logprob.rank
    )


def _read_logprob(message: pb.TokenLogprob) -> TokenLogprob | None:
    if not message.HasField("token_id"):
        return None
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprob(message.token_id, message.logprob, top, message.rank if message.HasField("rank") else None)


def _read_logprobs(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob | None, ...]:
    return tuple(map(_read_logprob, messages))
