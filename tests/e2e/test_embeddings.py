"""A language model and an embedding model behind one server: each gives what it gives offline, whatever the other does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest

from jaxinfer.config import ConfigError, DeviceConfig, EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams
from server.config import ServerConfig
from server.local_backend import LocalBackend
from server.openai.app import create_app
from tests import tiny_encoder
from tests.conftest import MakeLLM
from tests.engine.workload import workload
from tests.golden import embeddings
from tests.server.serving import served

PROMPTS, _ = workload()
TOKENS = tiny_encoder.token_lists()
EXPECTED = embeddings.load().tiny_mean
NAMES = ServerConfig(served_model_name=("tiny",), served_embedding_name=("encoder",))


@pytest.fixture(scope="module")
def encoder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder.write(tmp_path_factory.mktemp("encoder"), normalizes=False)


@pytest.fixture(scope="module")
def config(llms: MakeLLM, encoder_path: Path) -> EngineConfig:
    config = llms().engine.config
    return replace(config, model=replace(config.model, embedding_model=str(encoder_path)))


@pytest.fixture(scope="module", params=["one device", "two devices"])
def engine(request: pytest.FixtureRequest, config: EngineConfig) -> Engine:
    if request.param == "two devices":
        config = replace(config, devices=DeviceConfig(prefill_devices=(1,), decode_devices=(0,)))
    return Engine(config)


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[openai.OpenAI]:
    app = create_app(LocalBackend(engine), engine.tokenizer, NAMES)
    with served(app) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
        yield api


def embed(api: openai.OpenAI, token_lists: list[list[int]]) -> np.ndarray:
    answer = api.embeddings.create(model="encoder", input=token_lists)
    assert answer.usage.prompt_tokens == sum(map(len, token_lists))
    return np.array([data.embedding for data in answer.data])


def test_both_at_once_give_what_they_give_alone(api: openai.OpenAI, engine: Engine, llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 60}
    expected = [o.outputs[0].text for o in llm.generate(PROMPTS[:8], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))]
    texts: list[str] = []

    def complete() -> None:
        answer = api.completions.create(model="tiny", prompt=PROMPTS[:8], extra_body={"ignore_eos": True}, **params)
        texts.extend(choice.text for choice in answer.choices)

    thread = threading.Thread(target=complete)
    thread.start()
    num_beside = 0
    while thread.is_alive():
        np.testing.assert_allclose(embed(api, TOKENS), EXPECTED, atol=2e-5)
        num_beside += thread.is_alive()
    thread.join()
    assert texts == expected
    assert num_beside > 0
    for number in (1, 9, 30):
        np.testing.assert_allclose(embed(api, TOKENS * number), np.concatenate([EXPECTED] * number), atol=2e-5)
    assert engine.stats.num_compilations_after_ready == 0


def test_a_client_that_leaves_stops_its_texts(api: openai.OpenAI, engine: Engine) -> None:
    with pytest.raises(openai.APITimeoutError):
        api.with_options(timeout=0.05).embeddings.create(model="encoder", input=[[2] * tiny_encoder.MAX_TOKENS] * 2048)
    deadline = time.monotonic() + 20
    while engine.encode.has_work:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    np.testing.assert_allclose(embed(api, TOKENS), EXPECTED, atol=2e-5)


def test_both_offline(config: EngineConfig, llm: LLM) -> None:
    both = LLM(config=config)
    np.testing.assert_allclose(both.embed(TOKENS), EXPECTED, atol=2e-5)
    assert both.embed(TOKENS[0], dimensions=5).shape == (1, 5)
    params = SamplingParams(temperature=0.0, max_tokens=10)
    assert both.generate(PROMPTS[0], params)[0].outputs == llm.generate(PROMPTS[0], params)[0].outputs
    assert both.engine.stats.num_compilations_after_ready == 0
    assert both.engine.stats.num_programs == llm.engine.stats.num_programs + 5
    with pytest.raises(ConfigError, match=r"no embedding model: .*LLM\(embedding_model='minilm'\)"):
        llm.embed(["a"])
