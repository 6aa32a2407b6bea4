"""What watches over a server: models, health, metrics, live numbers, the chat page."""

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

import server
from jaxinfer.config import ConfigError
from jaxinfer.stats import EngineStats, ExpertLoad, StageTimes, TierStats
from server.config import ServerConfig
from server.metrics import live_numbers, metrics_text
from server.openai.app import create_app
from server.summary import RequestTiming, summary_table

STATIC = Path(server.__file__).parent / "static"


def test_models_are_listed_and_found_by_each_name(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/tiny", "encoder"]
    for model in listed["data"]:
        assert client.get(f"/v1/models/{model['id']}").json() == model
    assert [model["max_model_len"] for model in listed["data"]] == [512, 512, 300]


def test_a_new_server_is_healthy_and_ready(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}


def test_every_answer_carries_a_request_id(client):
    ids = [client.get(url).headers["x-request-id"] for url in ("/health", "/v1/models", "/v1/none")]
    assert len(set(ids)) == 3


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_tell_the_engines_numbers():
    stats = EngineStats(num_output_tokens=7, num_waiting=2, prefill_pages_used=3, prefill_pages=10, decode_pages=20, num_preemptions=1)
    stats.finished = {"stop": 4}
    stats.memory = {"decode weights": 1024}
    for seconds in (0.0005, 0.03, 100.0):
        stats.time_to_first_token.observe(seconds)
    text, content_type = metrics_text(stats, {("POST", "/v1/completions", 200): 5}, {})
    found = samples(text.decode())
    assert content_type.startswith("text/plain; version=0.0.4")
    assert found["jaxinfer_output_tokens_total",] == 7
    assert found["jaxinfer_requests_waiting",] == 2
    assert found["jaxinfer_preemptions_total",] == 1
    assert found["jaxinfer_compilations_after_ready_total",] == 0
    assert found["jaxinfer_kv_pages_used", ("mesh", "prefill")] == 3
    assert found["jaxinfer_kv_pages", ("mesh", "decode")] == 20
    assert found["jaxinfer_sequences_finished_total", ("reason", "stop")] == 4
    assert found["jaxinfer_memory_bytes", ("part", "decode weights")] == 1024
    assert found["jaxinfer_http_requests_total", ("code", "200"), ("method", "POST"), ("route", "/v1/completions")] == 5
    name = "jaxinfer_time_to_first_token_seconds"
    assert [found[f"{name}_bucket", ("le", le)] for le in ("0.001", "0.025", "0.05", "60.0", "+Inf")] == [1, 1, 2, 2, 3]
    assert (found[f"{name}_count",], found[f"{name}_sum",]) == (3, pytest.approx(100.0305))


def test_metrics_count_http_requests_by_route_not_by_path(client):
    client.get("/v1/models/tiny")
    for n in range(3):
        client.get(f"/made/up/{n}")
        client.post("/v1/completions", json={})
    found = samples(client.get("/metrics").text)
    counted = {key[3][1]: value for key, value in found.items() if key[0] == "jaxinfer_http_requests_total"}
    assert counted == {"/v1/models/{model_id:path}": 1, "other": 3, "/v1/completions": 3}


def test_every_number_of_the_engine_is_exported():
    """A field added to EngineStats must reach /metrics too."""
    stats = EngineStats()
    numbers = [name for name in EngineStats.__slots__ if isinstance(getattr(stats, name), int | float)]
    for value, name in enumerate(numbers, 1000):
        setattr(stats, name, value)
    text, _ = metrics_text(stats, {}, {})
    exported = samples(text.decode()).values()
    assert [name for value, name in enumerate(numbers, 1000) if value not in exported] == []


def test_every_number_of_the_tiers_is_exported():
    numbers = [name for name in TierStats.__slots__ if name != "refused"]
    tiers = TierStats(**{name: value for value, name in enumerate(numbers, 2000)}, refused={"damaged": 3000, "other model": 3001})
    found = samples(metrics_text(EngineStats(read_tiers=lambda: tiers), {}, {})[0].decode())
    assert [name for value, name in enumerate(numbers, 2000) if value not in found.values()] == []
    assert found["jaxinfer_kv_tier_bytes", ("tier", "disk")] == tiers.disk_bytes
    assert found["jaxinfer_kv_tier_hits_total", ("tier", "host")] == tiers.num_host_hits
    assert found["jaxinfer_kv_tier_refused_pages_total", ("reason", "other model")] == 3001
    assert not any("kv_tier" in name for name, *_ in samples(metrics_text(EngineStats(), {}, {})[0].decode()))


def test_loads_of_experts_are_exported_where_there_are_any():
    loads = {"prefill": ExpertLoad(1.5, 2.5, None), "decode": ExpertLoad(3.5, 4.5, 1.25)}
    found = samples(metrics_text(EngineStats(read_expert_loads=lambda: loads), {}, {})[0].decode())
    ratios = {tuple(labels): value for (name, *labels), value in found.items() if name == "jaxinfer_expert_load_ratio"}
    assert ratios == {
        (("mesh", "prefill"), ("of", "experts")): 1.5,
        (("mesh", "prefill"), ("of", "experts of the worst layer")): 2.5,
        (("mesh", "decode"), ("of", "experts")): 3.5,
        (("mesh", "decode"), ("of", "experts of the worst layer")): 4.5,
        (("mesh", "decode"), ("of", "devices")): 1.25,
    }
    assert not any("expert" in name for name, *_ in samples(metrics_text(EngineStats(), {}, {})[0].decode()))
    text = shown(EngineStats(read_expert_loads=lambda: loads))
    assert text.count("the busiest device") == 1 and "the busiest had 1.50x the mean's tokens (2.50x in the worst layer)" in text
    assert "the busiest had 3.50x the mean's tokens (4.50x in the worst layer), the busiest device 1.25x" in text


def test_a_pipelines_stages_are_told_by_their_work_and_their_waits():
    stats = EngineStats(stage_times={"decode": [StageTimes(3.0, 0.5), StageTimes(1.0, 1.5)], "prefill": [StageTimes()] * 2})
    found = samples(metrics_text(stats, {}, {})[0].decode())
    assert [found[f"jaxinfer_stage_{kind}_seconds_total", ("mesh", "decode"), ("stage", "2")] for kind in ("busy", "bubble")] == [1.0, 1.5]
    assert found["jaxinfer_stage_busy_seconds_total", ("mesh", "decode"), ("stage", "1")] == 3.0
    assert stats.bubbles() == {"decode": 2.0 / 6.0}
    assert not any("stage" in name for name, *_ in samples(metrics_text(EngineStats(), {}, {})[0].decode()))
    assert "decode bubbles" in shown(stats, RequestTiming(1, 2, 0.1, 0.1)) and "33% of the stages' time" in shown(
        stats, RequestTiming(1, 2, 0.1, 0.1)
    )
    pipeline = EngineStats(decode_devices=("cpu:0", "cpu:1"), decode_layout="tp=1,pp=2")
    assert "cpu:0, cpu:1: tp=1,pp=2" in shown(pipeline)


def shown(stats, measured=None):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(summary_table(stats, measured))
    return capture.get()


def test_the_summary_says_what_heads_that_devices_dont_divide_cost():
    assert "heads" not in shown(EngineStats())
    rows = [line.split() for line in shown(EngineStats(heads={"decode": "KV heads 3 -> 4"})).splitlines()]
    assert ["decode", "heads", "KV", "heads", "3", "->", "4"] in rows


def test_the_summary_tells_of_tiers_and_targets_where_there_are_any():
    assert "KV in host memory" not in shown(EngineStats())
    numbers = dict.fromkeys((name for name in TierStats.__slots__ if name != "refused"), 0)
    tiers = numbers | {"host_size": 3 << 30, "disk_size": 20 << 30, "disk_pages": 1234}
    text = shown(EngineStats(read_tiers=lambda: TierStats(**tiers, refused={"torn": 2, "other model": 3})))
    assert "3.0 GiB at most, 0 pages now" in text
    assert "20.0 GiB at most, 1234 pages now, 2 refused (torn), 3 refused (other model)" in text
    stats = EngineStats(target_itl=0.05, target_ttft=1.0, num_first_tokens_in_time=1)
    stats.time_to_first_token.observe(0.2)
    text = shown(stats, RequestTiming(5, 1, 0.2, 0.0))
    assert "1000 ms: met 100% of the time" in text
    assert "50 ms: not measured" in text


def test_targets_are_told_with_the_share_that_kept_them():
    stats = EngineStats(target_itl=0.05, num_gaps_in_time=3)
    stats.inter_token_latency.observe(0.04, 3)
    stats.inter_token_latency.observe(0.06)
    stats.time_to_first_token.observe(9.0)
    found = samples(metrics_text(stats, {}, {})[0].decode())
    assert found["jaxinfer_target_seconds", ("target", "itl")] == 0.05
    assert found["jaxinfer_target_met_ratio", ("target", "itl")] == 0.75
    assert not any(("target", "ttft") in labels for _, *labels in found), "none is set"
    assert live_numbers(stats)["targets"] == {"itl": {"seconds": 0.05, "met": 0.75}}
    assert live_numbers(EngineStats(target_ttft=1.0))["targets"] == {"ttft": {"seconds": 1.0, "met": None}}


def test_live_numbers_hold_what_the_page_shows(client):
    numbers = client.get("/stats").json()
    assert numbers["pages"] == {"prefill": [0, 64], "decode": [0, 128]}
    assert numbers["time_to_first_token"] is None
    stats = EngineStats()
    stats.time_to_first_token.observe(0.2)
    assert live_numbers(stats)["time_to_first_token"] == 0.2


def test_the_chat_page_is_served_with_all_it_loads(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) >= 2
    for path in loaded:
        if not path.startswith("data:"):
            assert client.get(path).status_code == 200, path


def test_the_chat_page_is_self_contained_and_never_parses_a_models_text_as_html():
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|<script>|\son\w+=", text), path


@pytest.mark.parametrize("url", ["/health", "/ready", "/ping"])
def test_probes_are_answered_without_a_body_too(client, backend, url):
    assert client.get(url).status_code == client.head(url).status_code == 200
    assert client.head(url).content == b""
    backend.failed = "the engine failed"
    assert client.get(url).status_code == client.head(url).status_code == 503


def test_the_version_and_the_load_are_told(client, backend):
    assert client.post("/ping").json() == {"status": "ok"}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", client.get("/version").json()["version"])
    assert client.get("/load").json() == {"server_load": 0}
    client.app.state.traffic.enter()
    assert client.get("/load").json() == {"server_load": 1}


def test_below_a_root_path_the_same_is_served_and_guarded(backend, tokenizer):
    config = ServerConfig(served_model_name=("tiny",), api_keys=("secret",), root_path="/llm")
    with TestClient(create_app(backend, tokenizer, config)) as client:
        for path in ("/v1/models", "/llm/v1/models"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer secret"}).json()["data"][0]["id"] == "tiny"
        assert [client.get(f"/llm/{path}").status_code for path in ("health", "", "static/main.js", "stats")] == [200] * 4
        assert client.get("/llmv1/models").status_code == client.get("/llm/llm/v1/models").status_code == 404
        assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    with pytest.raises(ConfigError, match="root_path is 'llm/': give one such as /llm"):
        ServerConfig(root_path="llm/")


def test_an_engine_that_hangs_in_an_iteration_is_unhealthy_and_one_that_is_busy_is_not(client, backend):
    backend.seconds_in_iteration = 299.0
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 200)
    backend.seconds_in_iteration = 301.0
    for path in ("/health", "/ready"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert answer.json()["status"].startswith("the engine has been in one iteration for 301 s (watchdog_timeout is 300)")
