"""What both APIs take beyond OpenAI's, under vLLM's names and with its meaning."""

import asyncio

import pytest

from server.batches.lines import answer_line, read_line
from server.openai.service import Service
from tests.server.batches.conftest import line
from tests.server.fakes import ANSWER, MAX_MODEL_LEN
from tests.server.sse import chunks_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]}
TEXT = {"model": "tiny", "prompt": "Hi", "max_tokens": 99}
START = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHel"
BOTH = pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)], ids=["chat", "text"])


def answer_of(client, path, body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        ({}, START + "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, START + "<|im_end|>\n"),
        ({"continue_final_message": True}, START),
        ({"continue_final_message": True, "add_generation_prompt": False}, START),
    ],
    ids=str,
)
def test_a_prompt_ends_as_asked(client, backend, tokenizer, asked, prompt):
    answer_of(client, "/v1/chat/completions", CHAT | asked)
    assert tokenizer.decode(backend.seen[-1][1], skip_special_tokens=False) == prompt


def test_an_answer_neither_begins_and_continues(client):
    error = client.post("/v1/chat/completions", json=CHAT | {"continue_final_message": True, "add_generation_prompt": True})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "continue_final_message")


def test_a_chats_echo_is_what_the_assistant_had_said(client):
    asked = {"echo": True, "continue_final_message": True}
    assert answer_of(client, "/v1/chat/completions", CHAT | asked)["choices"][0]["message"]["content"] == "Hel" + ANSWER
    chunks = chunks_of(client.post("/v1/chat/completions", json=CHAT | asked | {"stream": True, "n": 2}))
    for index in range(2):
        own = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[:2] == ["", "Hel"] and "".join(filter(None, own)) == "Hel" + ANSWER
    users = CHAT | {"messages": CHAT["messages"][:1], "echo": True}
    assert answer_of(client, "/v1/chat/completions", users)["choices"][0]["message"]["content"] == ANSWER


@BOTH
def test_how_to_sample_reaches_the_engine(client, backend, path, body):
    asked = {
        "allowed_token_ids": [5, 6],
        "bad_words": ["bad", "very bad"],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": True if "messages" in body else 0,
        "logprob_token_ids": [7, 8, 9],
    }
    answer_of(client, path, body | asked)
    params = backend.seen[-1][2]
    assert (params.allowed_token_ids, params.bad_words, params.logprob_token_ids) == ((5, 6), ("bad", "very bad"), (7, 8, 9))
    assert (params.skip_special_tokens, params.include_stop_str_in_output, params.logprobs) == (False, True, 3)


@BOTH
def test_prompts_are_truncated_from_their_beginning(client, backend, path, body):
    answer_of(client, path, body)
    whole = backend.seen[-1][1]
    for count in (1, 2, 500):
        usage = answer_of(client, path, body | {"truncate_prompt_tokens": count})["usage"]
        assert backend.seen[-1][1] == whole[-count:] and usage["prompt_tokens"] == len(whole[-count:])
    long = {"messages": [{"role": "user", "content": "x" * 5000}]} if "messages" in body else {"prompt": "x" * 5000}
    assert client.post(path, json=body | long).status_code == 400
    for max_tokens, kept in ((12, MAX_MODEL_LEN - 12), (32_000, MAX_MODEL_LEN - 1)):
        answer_of(client, path, body | long | {"truncate_prompt_tokens": -1, "max_tokens": max_tokens})
        assert len(backend.seen[-1][1]) == kept


def test_token_ids_are_truncated_as_texts_are(client, backend):
    answer_of(client, "/v1/completions", TEXT | {"prompt": [[1, 2, 3], [4]], "truncate_prompt_tokens": 2})
    assert sorted(prompt for _, prompt, _ in backend.seen) == [(2, 3), (4,)]


@BOTH
def test_log_probabilities_of_the_prompt(client, backend, path, body):
    answer = answer_of(client, path, body | {"prompt_logprobs": 2, "n": 2})
    prompt = backend.seen[-1][1]
    for told in [answer["prompt_logprobs"]] if "messages" in body else [choice["prompt_logprobs"] for choice in answer["choices"]]:
        assert told[0] is None and len(told) == len(prompt)
        assert [next(iter(of_token)) for of_token in told[1:]] == [str(token) for token in prompt[1:]]
        own = told[1].pop(str(prompt[1]))
        assert own["logprob"] == -prompt[1] / 100
        assert {token: of_token["rank"] for token, of_token in told[1].items()} == {"0": 1, "1": 2}
        assert told[1]["0"]["decoded_token"] == "!"
    error = client.post(path, json=body | {"prompt_logprobs": 2, "stream": True}).json()["error"]
    assert error["param"] == "prompt_logprobs" and "whole answers only" in error["message"]


@BOTH
def test_an_answer_has_its_token_ids_where_asked(client, backend, path, body):
    expected = list(ANSWER.encode())
    whole = answer_of(client, path, body | {"return_token_ids": True, "n": 2})
    prompt = list(backend.seen[-1][1])
    places = [whole] if "messages" in body else whole["choices"]
    assert all(place["prompt_token_ids"] == prompt for place in places)
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == len(expected) and [choice["token_ids"] for choice in whole["choices"]] == [ids, ids]
    chunks = chunks_of(client.post(path, json=body | {"return_token_ids": True, "stream": True}))
    assert [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])] == ids
    places = chunks if "messages" in body else [choice for chunk in chunks for choice in chunk["choices"]]
    assert [place.get("prompt_token_ids") for place in places] == [prompt, *[None] * (len(places) - 1)]
    assert "token_ids" not in client.post(path, json=body).text


@BOTH
def test_log_probabilities_may_name_tokens_by_their_ids(client, backend, path, body):
    logprobs = {"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2}
    choice = answer_of(client, path, body | logprobs | {"return_tokens_as_token_ids": True, "return_token_ids": True})["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    if "messages" in body:
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == names
        assert [top["token"] for top in choice["logprobs"]["content"][0]["top_logprobs"]] == ["token_id:0", "token_id:1"]
    else:
        assert choice["logprobs"]["tokens"] == names
        assert set(choice["logprobs"]["top_logprobs"][0]) == {"token_id:0", "token_id:1", names[0]}


@BOTH
@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"allowed_token_ids": [300]}, "allowed_token_ids", "300: the model's go from 0 to 257"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "is empty"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids", "without logprobs"),
        ({"bad_words": [" "]}, "bad_words", "not blank"),
        ({"bad_words": "word"}, "bad_words", "valid list"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens is 0"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(client, path, body, asked, param, words):
    error = client.post(path, json=body | asked)
    assert (error.status_code, error.json()["error"]["param"]) == (400, param)
    assert words in error.json()["error"]["message"]


def test_a_batchs_line_has_them_too(backend, tokenizer, config):
    asked = {"max_tokens": 32_000, "return_token_ids": True, "prompt_logprobs": 0, "truncate_prompt_tokens": 3, "bad_words": ["x"]}
    _, read = read_line(line("a", body=TEXT | {"prompt": "Hello"} | asked).encode())
    backend.started = True
    answer = asyncio.run(answer_line(Service(backend, tokenizer, config, created=0), "batch_req_1", "a", read))
    body = answer["response"]["body"]
    assert answer["response"]["status_code"] == 200
    [choice] = body["choices"]
    assert tokenizer.decode(choice["prompt_token_ids"]) == "llo" and len(choice["prompt_logprobs"]) == 3
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"] and backend.seen[-1][2].bad_words == ("x",)
