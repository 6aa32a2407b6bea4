"""Answers held to a grammar, by a real engine over a tiny model whose tokens are bytes and pieces: every answer is what was asked for, the same on
every layout, and rows without a grammar get what they get alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, RequestError, SamplingParams, StructuredOutputs
from jaxinfer.kv_transfer.page_client import PageClient
from jaxinfer.kv_transfer.page_server import PageServer
from jaxinfer.request import RequestOutput
from tests.conftest import TINY, MakeLLM
from tests.covering import covered_layouts
from tests.engine.page_audit import assert_all_free
from tests.engine.test_remote_handoffs import Pair, check_all_free
from tests.engine.workload import workload

PROMPTS, PARAMS = workload()
SMALL: dict[str, Any] = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (32, 128)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "few pages": {"kv_memory": "40KiB"},
    "tp=2 to pp=2": {"prefill_parallel": "tp=2", "prefill_devices": (0, 1), "decode_parallel": "pp=2", "decode_devices": (2, 3)},
    "one mesh of two": {"prefill_parallel": "tp=2", "prefill_devices": (0, 1)},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bc"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
WANTED = [
    StructuredOutputs(json_schema=SCHEMA),
    StructuredOutputs(regex=r"[0-9]{3}-[a-z]{2,4}"),
    StructuredOutputs(choice=("yes", "no", "no, never")),
    StructuredOutputs(grammar='start: "<" word ("," word){1,3} ">"\nword: /[a-c]{2}/'),
]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "top_p": 0.9},
]


def is_right(wanted: StructuredOutputs, text: str) -> bool:
    if wanted.json_schema is not None:
        found = json.loads(text)
        return (
            list(found) == ["name", "size", "kind"]
            and len(found["name"]) <= 5
            and 0 <= found["size"] <= 99
            and found["kind"] in ("a", "bc")
        )
    if wanted.choice:
        return text in wanted.choice
    return re.fullmatch(wanted.regex or r"<[a-c]{2}(,[a-c]{2}){1,3}>", text) is not None


def answers(llm: LLM) -> list[RequestOutput]:
    """Each kind of grammar in each way of sampling, and requests without one in the same batches."""
    held = [SamplingParams(max_tokens=100, logprobs=1, structured_outputs=wanted, **way) for wanted in WANTED for way in WAYS]
    prompts = [PROMPTS[number % 6] for number in range(len(held))]
    return llm.generate([*prompts, *PROMPTS[:4]], [*held, *PARAMS[:4]])


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(llms: MakeLLM) -> list[list[list[int]]]:
    llm = llms(**SMALL)
    outputs = answers(llm)
    for number, wanted in enumerate(WANTED):
        for output in outputs[number * len(WAYS) : (number + 1) * len(WAYS)]:
            assert output.outputs[0].finish_reason == "stop"
            assert is_right(wanted, output.outputs[0].text), output.outputs[0].text
    plain = llm.generate(PROMPTS[:4], PARAMS[:4])
    assert tokens_of(outputs[-4:]) == tokens_of(plain)
    assert llm.engine.stats.num_compilations_after_ready == 0
    return tokens_of(outputs)


def test_answers_are_what_was_asked_for(expected: list[list[list[int]]], llms: MakeLLM) -> None:
    """Again, with a prefix cache that has the prompts; and alone."""
    llm = llms(**SMALL)
    assert tokens_of(answers(llm)) == expected
    alone = llm.generate(PROMPTS[0], SamplingParams(max_tokens=100, structured_outputs=WANTED[0], **WAYS[0]))
    assert tokens_of(alone) == expected[:1]
    assert_all_free(llm.engine)


@pytest.mark.parametrize("layout", covered_layouts(LAYOUTS))
def test_every_layout_gives_the_same(expected: list[list[list[int]]], llms: MakeLLM, layout: str) -> None:
    llm = llms(**SMALL | LAYOUTS[layout])
    assert tokens_of(answers(llm)) == expected
    assert llm.engine.stats.num_compilations_after_ready == 0
    if layout == "few pages":
        assert llm.engine.stats.num_preemptions > 0
    assert_all_free(llm.engine)


def test_sequences_of_one_request_follow_grammars_of_their_own(llms: MakeLLM) -> None:
    params = SamplingParams(n=6, temperature=1.0, seed=1, max_tokens=100, structured_outputs=WANTED[1])
    [output] = llms(**SMALL).generate(PROMPTS[1], params)
    texts = [one.text for one in output.outputs]
    assert all(is_right(WANTED[1], text) for text in texts)
    assert len(set(texts)) > 3


def test_log_probabilities_are_the_models_own(llms: MakeLLM) -> None:
    llm = llms(**SMALL)
    [output] = llm.generate(PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=60, logprobs=0, structured_outputs=WANTED[3]))
    one = output.outputs[0]
    plain = llm.logprobs(PROMPTS[2] + one.token_ids)
    assert one.logprobs is not None
    for number, logprob in enumerate(one.logprobs):
        assert abs(logprob.logprob - float(plain[len(PROMPTS[2]) + number])) < 1e-3


def test_what_another_engine_has_answered_is_gone_on_from(expected: list[list[list[int]]], llms: MakeLLM) -> None:
    """The grammar's state is rebuilt from the tokens."""
    engine = llms(**SMALL).engine
    tokens = expected[0][0]
    params = SamplingParams(max_tokens=100, structured_outputs=WANTED[0], **WAYS[0])
    engine.add_request("moved", PROMPTS[0], params, output_ids=tokens[:5])
    found: list[int] = []
    while engine.has_requests:
        for delta in engine.step():
            found += delta.token_ids
    assert found == tokens[5:]


def test_requests_wait_for_the_programs_and_others_do_not(expected: list[list[list[int]]], tiny_model_path: Path) -> None:
    """A new engine; while it waits one is aborted, and the weights are put to sleep and woken."""
    engine = LLM(str(tiny_model_path), **(TINY | SMALL)).engine
    for name in ("held", "left"):
        engine.add_request(name, PROMPTS[0], SamplingParams(max_tokens=100, structured_outputs=WANTED[0], **WAYS[0]))
    engine.add_request("free", PROMPTS[0], PARAMS[0])
    engine.abort("left")
    engine.sleep(1)
    engine.wake()
    found: dict[str, list[int]] = {"held": [], "free": []}
    while engine.has_requests:
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
    assert found == {"held": expected[0][0], "free": expected[-4][0]}
    assert engine.stats.num_compilations_after_ready == 0
    assert_all_free(engine)


def test_one_engine_prefills_and_another_decodes(expected: list[list[list[int]]], llms: MakeLLM) -> None:
    source = llms(**SMALL, kv_peers=True, prefill_chunk_size=64)
    target = llms(**SMALL, kv_peers=True, prefill_devices=(1,), decode_devices=(2,), page_size=32)
    pair = Pair(source.engine, target.engine, PageServer("127.0.0.1"), PageClient())
    for number, wanted in enumerate(WANTED):
        pair.add_request(str(number), PROMPTS[number * len(WAYS) % 6], SamplingParams(max_tokens=100, structured_outputs=wanted, **WAYS[0]))
    pair.add_request("left", PROMPTS[0], SamplingParams(structured_outputs=WANTED[0]))
    target.engine.abort("left")
    source.engine.abort("left")
    pair.run()
    assert [pair.tokens[str(number)] for number in range(len(WANTED))] == [one[0] for one in expected[:: len(WAYS)][: len(WANTED)]]
    assert target.engine.stats.num_taken_over == 0
    check_all_free(source.engine, target.engine)
    pair.server.close()
    pair.client.close()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"json_schema": {"type": "thing"}}, "Invalid type: thing"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "'/nowhere' does not exist"),
        ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "json schema"),
        ({"regex": "a("}, "unclosed group"),
        ({"json_schema": {"$ref": "#"}}, "no text satisfies it"),
        ({"json_schema": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(20_000)}}}, "too large"),
        ({"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, "recursion limit"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"json_schema": "{"}, "structured outputs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_can_not_be_followed_is_refused_with_the_reason(llms: MakeLLM, wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as error:
        llms(**SMALL).generate(PROMPTS[0], SamplingParams(structured_outputs=StructuredOutputs(**wanted)))
    assert error.value.param == "structured_outputs"


def test_values_are_checked() -> None:
    for given, words in (
        ({}, "nothing: give one of"),
        ({"regex": "a", "choice": ("a",)}, "regex and choice"),
        ({"choice": "yes"}, "must be a list"),
        ({"choice": [""]}, "not empty"),
        ({"regex": "a" * 1_000_001}, "1,000,001 characters: at most 1,000,000"),
    ):
        with pytest.raises(RequestError, match=re.escape(words)):
            StructuredOutputs(**given)
    with pytest.raises(RequestError, match="don't go together"):
        SamplingParams(allowed_token_ids=(1,), structured_outputs=StructuredOutputs(regex="a"))


def test_an_engine_without_them_says_so(llms: MakeLLM) -> None:
    with pytest.raises(RequestError, match="--no-structured-outputs"):
        llms(structured_outputs=False).generate(PROMPTS[0], SamplingParams(structured_outputs=WANTED[1]))
