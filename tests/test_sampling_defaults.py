"""How a model's makers would have it sampled, where nobody says otherwise."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from checkpoints.source import CheckpointError
from jaxinfer.generation import RequestReader
from jaxinfer.request import SamplingParams
from jaxinfer.sampling_defaults import describe, read_sampling_defaults
from jaxinfer.segments import Prompt
from tests.server.fakes import byte_tokenizer

SETTINGS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 99}
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_tokens": 99}


def write(folder, **settings):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "do_sample": True, "top_k": None, **settings}))
    return folder


def test_a_checkpoints_file_is_read_and_a_flag_turns_it_off(tmp_path):
    assert read_sampling_defaults("x", tmp_path, "auto") == {}
    assert read_sampling_defaults("x", tmp_path / "model.gguf", "auto") == {}
    assert read_sampling_defaults("x", write(tmp_path), "auto") == {}, "nulls say nothing"
    write(tmp_path, **SETTINGS)
    assert read_sampling_defaults("x", tmp_path, "auto") == DEFAULTS
    assert read_sampling_defaults("x", tmp_path, "none") == {}
    assert describe({"temperature": 0.6, "top_k": 20}) == "temperature 0.6, top_k 20"


def test_the_default_models_card_stands_for_the_file_that_it_has_not(tmp_path):
    assert read_sampling_defaults("default", tmp_path / "model.gguf", "auto") == {"temperature": 0.2, "top_p": 0.9}
    assert read_sampling_defaults("default", tmp_path / "model.gguf", "none") == {}


def test_a_value_that_can_not_be_is_an_error_with_a_way_out(tmp_path):
    with pytest.raises(CheckpointError, match=r"temperature is -1: .* --generation-config none"):
        read_sampling_defaults("x", write(tmp_path, temperature=-1), "auto")


def test_calls_without_parameters_take_them_and_given_ones_mean_what_they_say():
    engine = SimpleNamespace(
        sampling_defaults=DEFAULTS,
        tokenizer=byte_tokenizer(),
        max_model_len=100,
        validate=lambda token_ids, params: Prompt.of_tokens(token_ids),
    )
    reader = RequestReader(engine, SimpleNamespace(check=lambda: None, new_id=lambda: "id"))
    [request] = reader.read("a text", None).requests
    assert request.params == reader.default_params() == SamplingParams(**DEFAULTS)
    [request] = reader.read("a text", SamplingParams()).requests
    assert request.params == SamplingParams()
    messages = [{"role": "user", "content": "hi"}]
    assert reader.read_conversation(messages, None, {}).params == SamplingParams(**DEFAULTS)
    engine.sampling_defaults = {"temperature": 0.2}
    assert reader.read_conversation(messages, None, {}).params == SamplingParams(temperature=0.2, max_tokens=None)
