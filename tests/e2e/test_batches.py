"""/v1/batches over a real engine: its tokens, while interactive requests are served."""

from __future__ import annotations

import json
import time

import openai
import pytest

from jaxinfer.engine import Engine
from jaxinfer.request import SamplingParams
from server.batches.batch_store import BatchStore
from server.config import ServerConfig
from server.local_backend import LocalBackend
from server.openai.app import create_app
from tests.engine.workload import workload
from tests.server.serving import served

PROMPTS, _ = workload()


@pytest.fixture
def api(llm, tmp_path):
    engine, store = Engine(llm.engine.config), BatchStore(tmp_path)
    app = create_app(LocalBackend(engine), engine.tokenizer, ServerConfig(served_model_name=("tiny",)), store=store)
    with served(app) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
        yield api
    store.close()


def test_a_batchs_tokens_are_the_engines_and_others_are_served_meanwhile(api, llm):
    body = {"model": "tiny", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"{p}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}})
        for p, prompt in enumerate(PROMPTS)
    ]
    file = api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    interactive = api.completions.create(**{name: body[name] for name in ("model", "temperature", "max_tokens")}, prompt=PROMPTS[0])
    for _ in range(1000):
        batch = api.batches.retrieve(batch.id)
        if batch.status == "completed":
            break
        time.sleep(0.05)
    answers = [json.loads(answer) for answer in api.files.content(batch.output_file_id).text.splitlines()]
    expected = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert [answer["response"]["body"]["choices"][0]["text"] for answer in answers] == [output.outputs[0].text for output in expected]
    assert expected[0].outputs[0].text.startswith(interactive.choices[0].text)
    assert batch.usage.output_tokens == 30 * len(PROMPTS)
