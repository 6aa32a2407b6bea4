"""The tiny model behind a real server on a loopback port: one engine on one device, one on two meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import openai
import pytest

from jaxinfer.config import DeviceConfig
from jaxinfer.engine import Engine
from server.config import ServerConfig
from server.local_backend import LocalBackend
from server.openai.app import create_app
from tests.conftest import MakeLLM
from tests.server.serving import served


@dataclass(frozen=True)
class Served:
    engine: Engine
    url: str


@pytest.fixture(
    scope="module", params=[pytest.param("one device", marks=pytest.mark.exhaustive), "two devices"]
)  # module: its engine's thread ends with it
def tiny_server(request: pytest.FixtureRequest, llms: MakeLLM) -> Iterator[Served]:
    """A server with an engine of its own, so that `llm` can be asked for what is expected meanwhile."""
    config = llms().engine.config
    if request.param == "two devices":
        config = replace(config, devices=DeviceConfig(prefill_devices=(1,), decode_devices=(0,)))
    engine = Engine(config)
    with served(create_app(LocalBackend(engine), engine.tokenizer, ServerConfig(served_model_name=("tiny",)))) as url:
        yield Served(engine, url)


@pytest.fixture
def api(tiny_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="none", max_retries=0) as api:
        yield api
