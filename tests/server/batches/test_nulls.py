"""No answer has a null where OpenAI's schema has none: clients with types of their own refuse such an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.server.batches.test_http import CHAT, create, ended, line, upload
from tests.server.sse import chunks_of

# What OpenAI's schema, or its API in streams, has as null.
NULLABLE = re.compile(
    r"(choices\[\]\.(logprobs|finish_reason|message\.(content|refusal)|logprobs\.(refusal|token_logprobs\[\]|top_logprobs\[\]))"
    r"|service_tier|usage|metadata|errors\.data\[\]\.(param|line)|error\.(param|code))"
)
TEXT = {"model": "tiny", "prompt": "a"}


def nulls(value: Any, path: str = "") -> Iterator[str]:
    match value:
        case None:
            yield path
        case dict():
            for name, item in value.items():
                yield from nulls(item, f"{path}.{name}".removeprefix("."))
        case list():
            for item in value:
                yield from nulls(item, f"{path}[]")


def test_nulls_are_only_where_openai_has_them(client, backend):
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    answers = [client.post("/v1/chat/completions", json=CHAT).json(), client.post("/v1/completions", json=TEXT | {"priority": 5}).json()]
    answers += chunks_of(client.post("/v1/chat/completions", json=CHAT | usage))
    answers += chunks_of(client.post("/v1/completions", json=TEXT | usage | {"logprobs": 1, "echo": True, "priority": 5}))
    answers += [client.get("/v1/models").json(), client.post("/v1/embeddings", json={"model": "encoder", "input": "a"}).json()]
    answers += [client.get(f"/v1/{kind}").json() for kind in ("files", "batches")]
    backend.hold.clear()
    file = upload(client, line("a"), "")
    answers += [file, create(client, file)]
    backend.hold.set()
    done = ended(client, answers[-1])
    failed = ended(client, create(client, upload(client, "bad")))
    output = client.get(f"/v1/files/{done['output_file_id']}").json()
    answers += [done, failed, output, *(client.get(f"/v1/{kind}").json()["data"] for kind in ("files", "batches"))]
    answers.append(client.post("/v1/completions", json={}).json())
    assert failed["status"] == "failed" and "expires_at" not in output
    found = {path.removeprefix("[].") for answer in answers for path in nulls(answer)}
    assert [path for path in found if not NULLABLE.fullmatch(path)] == []
    # What OpenAI's schema requires is there, null or not.
    assert {"choices[].logprobs", "choices[].message.refusal", "metadata", "error.code"} & found == {
        "choices[].logprobs",
        "choices[].message.refusal",
        "metadata",
    }
