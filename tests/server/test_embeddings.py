"""/v1/embeddings: what may be asked, in which forms it is answered, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import threading

import numpy as np
import openai
import pytest
import tokenizers
from fastapi.testclient import TestClient
from tokenizers import models, pre_tokenizers

from jaxinfer.config import ConfigError
from jaxinfer.encode.text_batching import TextReader
from jaxinfer.request import RequestError
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.chat_template import ChatTemplate
from jaxinfer.tokenizer.components import with_ends
from server.api_keys import tenant_name
from server.config import ServerConfig
from server.openai.app import create_app
from server.openai.caller import Caller
from server.openai.embeddings import respond
from server.openai.protocol import MAX_INPUTS, EmbeddingRequest
from server.openai.service import Service
from server.openai.text_work import LONG_TEXT
from tests.server.fakes import EMBEDDING_SIZE, MAX_TOKENS, embedding
from tests.server.serving import served


def ask(client, **body):
    return client.post("/v1/embeddings", json={"model": "encoder", "input": "Hi"} | body)


def vectors(response):
    assert response.status_code == 200, response.text
    return np.array([data["embedding"] for data in response.json()["data"]])


def error(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "wörld 🎉", "Hi"], ["Hi", "wörld 🎉", "Hi"]),
        ([72, 105], [[72, 105]]),
        ([[72], [105, 105]], [[72], [105, 105]]),
    ],
)
def test_texts_and_token_ids_alone_and_in_lists(client, backend, tokenizer, given, texts):
    token_lists = [tokenizer.encode(text) if isinstance(text, str) else text for text in texts]
    response = ask(client, input=given)
    np.testing.assert_allclose(vectors(response), [embedding(token_ids) for token_ids in token_lists], rtol=1e-6)
    assert backend.embedded == [token_lists]
    answer = response.json()
    assert [data["index"] for data in answer["data"]] == list(range(len(texts)))
    assert (answer["object"], answer["data"][0]["object"], answer["model"]) == ("list", "embedding", "encoder")
    num_tokens = sum(map(len, token_lists))
    assert answer["usage"] == {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "jaxinfer": {"queue_seconds": 0.25, "prefill_seconds": 0.5, "decode_seconds": 0.0},
    }


def test_base64_holds_the_same_numbers_as_little_endian_float32(client):
    texts = ["Hi", "there"]
    numbers = vectors(ask(client, input=texts, encoding_format="float"))
    encoded = [data["embedding"] for data in ask(client, input=texts, encoding_format="base64").json()["data"]]
    assert np.array_equal(np.stack([np.frombuffer(base64.b64decode(text), "<f4") for text in encoded]), numbers.astype(np.float32))


def test_dimensions_keep_the_first_numbers_at_length_1(client):
    whole, cut = vectors(ask(client)), vectors(ask(client, dimensions=3))
    np.testing.assert_allclose(cut, whole[:, :3] / np.linalg.norm(whole[:, :3]), rtol=1e-6)
    assert np.array_equal(vectors(ask(client, dimensions=EMBEDDING_SIZE)), whole)


@pytest.mark.parametrize("dimensions", [0, -1, EMBEDDING_SIZE + 1])
def test_other_dimensions_are_refused(client, backend, dimensions):
    told = error(ask(client, dimensions=dimensions))
    assert told["param"] == "dimensions"
    assert str(dimensions) in told["message"]
    assert str(EMBEDDING_SIZE) in told["message"]
    assert backend.embedded == []


def test_a_text_over_the_limit_is_refused_with_its_place_and_both_counts(client, backend):
    told = error(ask(client, input=["Hi", "x" * MAX_TOKENS, "y" * (MAX_TOKENS + 1)]))
    assert (told["code"], told["param"]) == ("context_length_exceeded", "input")
    assert "input[2] has 301 tokens" in told["message"]
    assert "at most 300" in told["message"]
    assert error(ask(client, input=[7] * 301))["message"].startswith("input has 301 tokens")
    assert backend.embedded == []


@pytest.mark.parametrize("given", ["", [], [""], ["Hi", ""], [[]], [[1], []], None, 3, [1.5], {"text": "Hi"}, ["Hi", 3], "\ud83d"])
def test_what_is_no_text_is_refused(client, backend, given):
    response = client.post(
        "/v1/embeddings", content=json.dumps({"model": "encoder", "input": given}), headers={"content-type": "application/json"}
    )
    assert error(response)["param"].startswith("input")
    assert backend.embedded == []


def test_a_token_that_the_model_has_not_is_refused(client, tokenizer):
    told = error(ask(client, input=[[1], [5, tokenizer.vocab_size]]))
    assert told["message"] == f"input[1] has token id {tokenizer.vocab_size}: this model's are 0 to {tokenizer.vocab_size - 1}"


def test_more_texts_than_may_be_asked_at_once_are_refused(client):
    assert len(vectors(ask(client, input=["a"] * MAX_INPUTS))) == MAX_INPUTS
    assert f"input has over {MAX_INPUTS} entries" in error(ask(client, input=["a"] * (MAX_INPUTS + 1)))["message"]


def test_what_else_is_asked_wrongly_is_named(client):
    assert error(ask(client, encoding_format="hex"))["param"] == "encoding_format"
    assert "did you mean 'dimensions'?" in error(ask(client, dimension=4))["message"]
    assert ask(client, user="somebody", encoding_format=None, dimensions=None).status_code == 200


def test_the_model_must_be_the_embedding_model(client):
    for name in ("tiny", "none"):
        told = error(ask(client, model=name), 404)
        assert told["code"] == "model_not_found"
        assert "embeddings here are made by encoder" in told["message"]
    chat = client.post("/v1/chat/completions", json={"model": "encoder", "messages": [{"role": "user", "content": "Hi"}]})
    assert error(chat, 404)["code"] == "model_not_found"


def test_without_an_embedding_model_the_answer_says_which_setting_gives_one(client, backend):
    backend.text_reader = None
    told = error(ask(client), 404)
    assert told["code"] == "embeddings_disabled"
    assert "--embedding-model minilm" in told["message"]
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "org/tiny"]


def test_a_full_queue_and_a_failure_are_told_as_for_the_other_paths(client, backend):
    backend.is_full = True
    full = ask(client)
    assert (full.status_code, full.headers["retry-after"]) == (429, "7")
    backend.is_full, backend.failed = False, "the engine failed"
    assert error(ask(client), 503)["code"] == "service_unavailable"


def test_tokens_are_billed_to_the_key(backend, tokenizer):
    config = ServerConfig(served_embedding_name=("encoder",), api_keys=("a-key",))
    with TestClient(create_app(backend, tokenizer, config), headers={"Authorization": "Bearer a-key"}) as client:
        assert ask(client, input=["Hi", "there"]).status_code == 200
        backend.is_full = True
        assert ask(client, input="Hi").status_code == 429
        metrics = client.get("/metrics").text
    tenant = f'tenant="{tenant_name("a-key")}"'
    assert f"jaxinfer_tenant_input_tokens_total{{{tenant}}} 7.0" in metrics
    assert f"jaxinfer_tenant_prefill_seconds_total{{{tenant}}} 0.5" in metrics
    for outcome in ("finished", "refused"):
        assert f'jaxinfer_tenant_requests_total{{outcome="{outcome}",{tenant}}} 1.0' in metrics


def test_a_request_that_takes_too_long_is_given_up_and_dropped(backend, tokenizer):
    backend.hold.clear()
    with TestClient(create_app(backend, tokenizer, ServerConfig(served_embedding_name=("encoder",), request_timeout=0.05))) as client:
        assert error(ask(client), 408)["code"] == "timeout"
    assert len(backend.aborted) == 1


def test_a_client_that_leaves_drops_its_request(backend, tokenizer, config):
    async def run():
        backend.hold.clear()
        task = asyncio.create_task(respond(Service(backend, tokenizer, config, 0), EmbeddingRequest(model="encoder", input="Hi"), Caller()))
        while not backend.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(backend.aborted) == 1

    asyncio.run(run())


def test_long_texts_are_tokenized_in_another_thread(client, backend, monkeypatch):
    threads = set()
    encode = type(backend.text_reader.tokenizer).encode
    monkeypatch.setattr(
        type(backend.text_reader.tokenizer), "encode", lambda *a, **k: threads.add(threading.current_thread()) or encode(*a, **k)
    )
    ask(client, input=["a"] * 2)
    few = set(threads)
    assert ask(client, input=["a" * 250] * (LONG_TEXT // 250)).status_code == 200
    assert len(few) == 1
    assert len(threads - few) == 1


def test_the_official_client_in_both_forms(backend, tokenizer, config):
    expected = [embedding(tokenizer.encode(text)) for text in ("Hi", "there")]
    with served(create_app(backend, tokenizer, config)) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
        for form in ({}, {"encoding_format": "float"}):  # by default it asks for base64, and gives numbers all the same
            answer = api.embeddings.create(model="encoder", input=["Hi", "there"], **form)
            np.testing.assert_allclose([data.embedding for data in answer.data], expected, rtol=1e-6)
            assert answer.usage.total_tokens == 7
        with pytest.raises(openai.NotFoundError, match="embeddings here are made by"):
            api.embeddings.create(model="tiny", input="Hi")


def test_longer_texts_are_truncated_where_that_is_asked_for(client, backend, tokenizer):
    text = "ab" * MAX_TOKENS
    ids = tokenizer.encode(text)
    cuts = [
        ({"truncate_prompt_tokens": 7}, ids[:7]),
        ({"truncate_prompt_tokens": -1}, ids[:MAX_TOKENS]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "right"}, ids[:7]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, ids[-7:]),
    ]
    for asked, kept in cuts:
        for given in (text, ids, [text, "Hi"]):
            answer = ask(client, input=given, **asked)
            assert backend.embedded.pop()[0] == kept
            assert answer.json()["usage"]["prompt_tokens"] == len(kept) + 2 * (given == [text, "Hi"])
    assert error(ask(client, input=text))["code"] == "context_length_exceeded"
    for wrong in (0, -2, MAX_TOKENS + 1, "7"):
        assert error(ask(client, truncate_prompt_tokens=wrong))["param"] == "truncate_prompt_tokens"
    assert error(ask(client, truncation_side="left"))["param"] == "truncation_side"
    assert error(ask(client, truncation_side="up", truncate_prompt_tokens=7))["param"] == "truncation_side"


def test_the_server_truncates_all_texts_with_embedding_truncate(backend, tokenizer):
    ids = tokenizer.encode("ab" * MAX_TOKENS)
    config = ServerConfig(served_embedding_name=("encoder",), embedding_truncate=True)
    with TestClient(create_app(backend, tokenizer, config)) as client:
        vectors(ask(client, input=["ab" * MAX_TOKENS, "Hi"]))
        vectors(ask(client, input=ids, truncate_prompt_tokens=5))
    assert backend.embedded == [[ids[:MAX_TOKENS], tokenizer.encode("Hi")], [ids[:5]]]


def test_the_special_tokens_around_a_text_stay_when_it_is_truncated():
    """As transformers does with truncation=True."""
    backend = tokenizers.Tokenizer(models.WordPiece({"[CLS]": 0, "[SEP]": 1, "[UNK]": 2, "a": 3, "b": 4, "c": 5}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = with_ends([("[CLS]", 0)], [("[SEP]", 1)])
    reader = TextReader(Tokenizer(backend, None, (), ChatTemplate(None, {})), 6, 10, EMBEDDING_SIZE)
    backend.enable_truncation(4)
    assert backend.encode("a b c b a").ids == [0, 3, 4, 1]
    backend.no_truncation()
    texts = ["a b c b a", [0, 3, 4, 5, 4, 3, 1], "a b", [0, 1]]
    for side, first in (("right", [0, 3, 4, 1]), ("left", [0, 4, 3, 1])):
        kept = [ids.tolist() for ids in reader.read(texts, "input", reader.truncation(4, side))]
        assert kept == [first, first, [0, 3, 4, 1], [0, 1]]
    assert reader.read(["a b"], "input", reader.truncation(3))[0].tolist() == [0, 3, 1]
    for wrong in (0, 2, 11):
        with pytest.raises(RequestError, match="give 3 to 10, or -1 for 10"):
            reader.truncation(wrong)


def test_names_of_the_embedding_model_are_checked():
    with pytest.raises(ConfigError, match="served_embedding_name has an empty name"):
        ServerConfig(served_embedding_name=("a", " "))
