"""/v1/embeddings: texts or token ids in, a vector for each out."""

from __future__ import annotations

import asyncio
import base64
from functools import partial

from jaxinfer.encode.text_batching import Embedded, TextReader, Truncation, cut
from jaxinfer.request import FinishReason, OutputDelta, RequestContext, RequestError
from server.openai.caller import UNKNOWN, Caller
from server.openai.protocol import EmbeddingRequest
from server.openai.responses import EmbeddingList, EmbeddingObject, EmbeddingUsage
from server.openai.service import Service, finished_by, new_id
from server.openai.text_work import work_on
from server.usage import RequestIdentity

ENDPOINT = "/v1/embeddings"


async def respond(service: Service, body: EmbeddingRequest, caller: Caller = UNKNOWN) -> EmbeddingList:
    """The whole answer. Raises what `errors.from_exception` knows."""
    reader = service.embedding_reader(body.model)
    reader.check_dimensions(body.dimensions)
    truncation = _truncation(service, reader, body)
    token_lists = await work_on(sum(map(len, body.inputs)), partial(reader.read, body.inputs, "input", truncation))
    id = new_id("embd")
    asked = RequestIdentity(id, caller.request_id, caller.tenant, caller.session, ENDPOINT, body.model, "default", 0)
    # The usage record counts a request as one prompt, however many texts it has.
    with service.usage.measure(asked, [range(sum(map(len, token_lists)))], 1) as usage:
        try:
            async with asyncio.timeout(caller.timeout):
                embedded = await service.backend.embed(id, token_lists, RequestContext(tenant=caller.tenant, priority=caller.priority or 0))
        except TimeoutError:
            usage.add(OutputDelta(id, 0, finish_reason=FinishReason.TIMEOUT))
            finished_by(FinishReason.TIMEOUT)  # raises the error
            raise
        usage.add(OutputDelta(id, 0, finish_reason=FinishReason.STOP, device_usage=embedded.usage))
    data = _data(embedded, body)
    return EmbeddingList.model_construct(object="list", data=data, model=body.model, usage=EmbeddingUsage.of(usage))


def _truncation(service: Service, reader: TextReader, body: EmbeddingRequest) -> Truncation | None:
    max_tokens = body.truncate_prompt_tokens
    if max_tokens is None and service.config.embedding_truncate:
        max_tokens = -1
    if max_tokens is None and body.truncation_side is not None:
        raise RequestError("truncation_side is given without truncate_prompt_tokens: give that too, or leave it out", "truncation_side")
    return None if max_tokens is None else reader.truncation(max_tokens, body.truncation_side or "right")


def _data(embedded: Embedded, body: EmbeddingRequest) -> list[EmbeddingObject]:
    embeddings = cut(embedded.embeddings, body.dimensions).astype("<f4", copy=False)
    if body.encoding_format == "base64":
        vectors: list[list[float] | str] = [base64.b64encode(row.tobytes()).decode() for row in embeddings]
    else:
        vectors = embeddings.tolist()
    # Built here from valid values: not checked again, number by number.
    return [EmbeddingObject.model_construct(object="embedding", index=i, embedding=vector) for i, vector in enumerate(vectors)]
