"""Two real models in memory for one, over HTTP: each answers as if it had a server of its own, whatever the other does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from safetensors.numpy import save_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.start_progress import StartProgress
from server.batches.batch_store import BatchStore
from server.cli.models_app import models_app
from server.cli.several_models import ModelSettings
from server.config import ServerConfig
from tests import tiny_model
from tests.conftest import TINY
from tests.server.serving import served

SMALL = TINY | {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (64,), "prefill_chunk_size": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CONFIG = ServerConfig(
    served_model_name=("first", "org/first"), models_memory="1500KiB", models_turn=0.2, weight_control=True, log_level="warning"
)
PROMPTS = [[seed * 7 % 400 + i for i in range(20)] for seed in range(6)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with other weights, contexts and chat templates."""
    base = tmp_path_factory.mktemp("several")
    first, second = tiny_model.write(base / "first"), tiny_model.write(base / "second", max_position_embeddings=256)
    save_file({name: tensor[::-1].copy() for name, tensor in tiny_model.tensors().items()}, second / "model.safetensors")
    about = json.loads((second / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages[0]['content'] }}"}
    (second / "tokenizer_config.json").write_text(json.dumps(about))
    return {"first": first, "second": second}


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> dict[str, list[str]]:
    """What each model writes by itself."""
    texts = {}
    for name, folder in folders.items():
        llm = LLM(str(folder), **SMALL)
        texts[name] = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]
    assert texts["first"] != texts["second"]
    return texts


@pytest.fixture(scope="module")
def api(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    names = {"first": CONFIG.model_names, "second": ("second",)}
    models = [ModelSettings(names[name], EngineConfig.of(model=str(folder), **SMALL)) for name, folder in folders.items()]
    store = BatchStore(tmp_path_factory.mktemp("batches") / "store")
    app = models_app(models, CONFIG, Console(quiet=True), StartProgress(), None, store)
    with served(app, CONFIG) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
    store.close()


def ask(api: httpx.Client, model: str, number: int, **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": PROMPTS[number], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return api.post("/v1/completions", json=body | fields)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def metric(api: httpx.Client, name: str, model: str) -> float:
    return next(float(line.split()[1]) for line in api.get("/metrics").text.splitlines() if line.startswith(f'{name}{{model="{model}"}}'))


def test_one_endpoint_lists_all_and_a_name_chooses(api: httpx.Client, wanted: dict[str, list[str]]) -> None:
    listed = {model["id"]: model["max_model_len"] for model in api.get("/v1/models").json()["data"]}
    assert listed == {"first": 512, "org/first": 512, "second": 256}
    assert api.get("/v1/models/second").json()["max_model_len"] == 256
    for model, of in (("first", "first"), ("second", "second"), ("org/first", "first")):
        answer = ask(api, model, 0)
        assert answer.json()["model"] == model
        assert text(answer) == wanted[of][0]
    unknown = ask(api, "third", 0)
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert "first, org/first, second" in unknown.json()["error"]["message"]
    prompts = {}
    for model in ("first", "second"):  # each has its chat template
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": True}
        prompts[model] = api.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
    assert len(prompts["first"]) > len(prompts["second"]) == 1


def test_requests_of_both_at_once_get_the_tokens_of_a_server_of_their_own(api: httpx.Client, wanted: dict[str, list[str]]) -> None:
    before = metric(api, "jaxinfer_model_sleeps_total", "first")
    asked = [(("first", "second")[number % 2], number * 5 % 6) for number in range(60)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda one: text(ask(api, *one)), asked))
    assert answers == [wanted[model][number] for model, number in asked]
    assert metric(api, "jaxinfer_model_sleeps_total", "first") > before
    states = api.get("/ready").json()["models"]
    assert sorted(states.values()) == ["asleep", "awake"], states
    assert metric(api, "jaxinfer_compilations_after_ready_total", "first") == 0
    families = list(text_string_to_metric_families(api.get("/metrics").text))
    assert len(families) == len({family.name for family in families})
    unnamed = {family.name for family in families if not all("model" in sample.labels for sample in family.samples)}
    prefixes = ("jaxinfer_http_", "jaxinfer_tenant_", "jaxinfer_batch_", "jaxinfer_build_info", "process_")
    assert [name for name in unnamed if not name.startswith(prefixes)] == []


def test_a_model_that_slept_has_no_keys_and_values_of_before(api: httpx.Client, wanted: dict[str, list[str]]) -> None:
    cached = []
    for model in ("first", "first", "second", "first"):
        answer = ask(api, model, 1)
        assert text(answer) == wanted[model][1]
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[1] > 0
    assert cached[2:] == [0, 0]


def test_a_stream_keeps_its_model_awake_and_what_waits_has_its_deadline(api: httpx.Client, wanted: dict[str, list[str]]) -> None:
    text(ask(api, "first", 0))
    body = {"model": "first", "prompt": PROMPTS[0], "max_tokens": 450, "ignore_eos": True, "stream": True}
    with api.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        late = ask(api, "second", 0, timeout=0.001)
        assert api.get("/ready").json()["models"] == {"first": "awake", "second": "asleep"}
        assert sum(line.startswith("data: {") for line in lines) > 100
    assert late.status_code == 408
    assert late.json()["error"]["code"] == "timeout"
    assert text(ask(api, "second", 0)) == wanted["second"][0]


def test_weights_are_controlled_for_each_model(api: httpx.Client, wanted: dict[str, list[str]], folders: dict[str, Path]) -> None:
    assert api.post("/v1/models/second/sleep", json={"level": 2}).json() == {"version": 1, "is_asleep": True}
    refused = ask(api, "second", 0)
    assert refused.status_code == 503
    assert "/v1/models/second/wake" in refused.json()["error"]["message"]
    assert text(ask(api, "org/first", 0)) == wanted["first"][0]
    assert api.get("/ready").status_code == 200
    assert api.post("/v1/models/second/wake", json={}).json() == {"version": 1, "is_asleep": False}
    assert text(ask(api, "second", 0)) == wanted["second"][0]
    answer = api.post("/v1/models/first/update_weights", json={"path": str(folders["first"])})
    assert answer.json() == {"version": 2, "is_asleep": False}, answer.text
    assert text(ask(api, "first", 2)) == wanted["first"][2]


def test_a_batch_may_name_both(api: httpx.Client, wanted: dict[str, list[str]]) -> None:
    lines = []
    for number in range(12):
        body = {
            "model": ("first", "second")[number % 2],
            "prompt": PROMPTS[number % 6],
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
        }
        lines.append(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}))
    file = api.post("/v1/files", files={"file": ("in.jsonl", "\n".join(lines).encode())}, data={"purpose": "batch"}).json()
    made = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    id, deadline = api.post("/v1/batches", json=made).json()["id"], time.monotonic() + 60
    while (batch := api.get(f"/v1/batches/{id}").json())["status"] != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    answers = [json.loads(line) for line in api.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()]
    texts = {int(answer["custom_id"]): answer["response"]["body"]["choices"][0]["text"] for answer in answers}
    assert texts == {number: wanted[("first", "second")[number % 2]][number % 6] for number in range(12)}


def test_a_model_larger_than_all_the_memory_is_refused_at_the_start(folders: dict[str, Path]) -> None:
    models = [ModelSettings((name,), EngineConfig.of(model=str(folder), **SMALL)) for name, folder in folders.items()]
    config = ServerConfig(models_memory="700KiB")
    with pytest.raises(ConfigError, match=r"models_memory is 700KiB, but first alone needs .* give more, or less kv_memory"):
        models_app(models, config, Console(quiet=True), StartProgress(), None, None)
