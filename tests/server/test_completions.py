"""/v1/completions answers in OpenAI's shapes."""

from tests.server.fakes import ANSWER, MAX_MODEL_LEN
from tests.server.sse import chunks_of

URL = "/v1/completions"
BODY = {"model": "tiny", "prompt": "Say"}
NUM_ANSWER = len(ANSWER.encode())


def test_a_prompt_is_continued_by_sixteen_tokens_unless_told_otherwise(client, backend):
    answer = client.post(URL, json=BODY).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    [choice] = answer["choices"]
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    assert ANSWER.startswith(choice["text"][:-1])
    assert answer["usage"]["completion_tokens"] == 16
    [(_, _, params)] = backend.seen
    assert params.max_tokens == 16


def test_prompts_come_as_text_texts_ids_or_lists_of_ids(client, backend, tokenizer):
    ids = tokenizer.encode("Say")
    for prompt in ("Say", ["Say"], ids, [ids]):
        assert client.post(URL, json=BODY | {"prompt": prompt}).status_code == 200
    assert [list(prompt) for _, prompt, _ in backend.seen] == [ids] * 4


def test_choices_are_numbered_prompt_by_prompt(client):
    body = BODY | {"prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 100}
    answer = client.post(URL, json=body).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == ["a" + ANSWER, "a" + ANSWER, "b" + ANSWER, "b" + ANSWER]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 4 * NUM_ANSWER


def test_logprobs_hold_the_sampled_token_beside_the_likeliest(client):
    logprobs = client.post(URL, json=BODY | {"logprobs": 2, "max_tokens": 2}).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e"]
    assert logprobs["text_offset"] == [0, 1]
    [first, _] = logprobs["top_logprobs"]
    assert len(first) == 3
    assert first["H"] == logprobs["token_logprobs"][0]
    assert list(first.values())[:2] == [0.0, -0.01]


def test_offsets_count_characters_and_a_split_character_has_one(client):
    choice = client.post(URL, json=BODY | {"logprobs": 0, "max_tokens": 100}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == ANSWER
    where = ANSWER.index("ö")
    assert logprobs["text_offset"][where : where + 3] == [where, where, where + 1]
    assert logprobs["text_offset"][-4:] == [len(ANSWER) - 1] * 4  # the four bytes of the last character
    assert all(len(top) == 1 for top in logprobs["top_logprobs"])


def test_echo_with_logprobs_scores_the_prompt_too(client):
    body = BODY | {"echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}
    for choice in client.post(URL, json=body).json()["choices"]:
        assert choice["text"] == "SayHe"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["S", "a", "y", "H", "e"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert None not in logprobs["token_logprobs"][1:]
        assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


def test_zero_tokens_with_echo_only_score_the_prompt(client, tokenizer):
    longest = tokenizer.encode("x" * MAX_MODEL_LEN)
    body = {"model": "tiny", "prompt": longest, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = client.post(URL, json=body).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("x" * MAX_MODEL_LEN, "length")
    assert len(choice["logprobs"]["tokens"]) == MAX_MODEL_LEN
    assert answer["usage"]["completion_tokens"] == 0


def test_a_stream_gives_the_pieces_of_the_whole_answer(client):
    settings = {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 100}
    whole = client.post(URL, json=BODY | settings).json()
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(client.post(URL, json=BODY | settings | stream))
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        for name, values in choice["logprobs"].items():
            assert [v for c in own if c["logprobs"] for v in c["logprobs"][name]] == values


def test_best_of_may_repeat_n(client):
    assert client.post(URL, json=BODY | {"n": 2, "best_of": 2}).status_code == 200
