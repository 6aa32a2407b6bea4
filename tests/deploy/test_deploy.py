"""What deploy/ says of this server is so: its flags, its probes, its metrics. What runs none of it can still know."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

import server
from jaxinfer.config import flat_fields
from jaxinfer.stats import EngineStats, ExpertLoad, StageTimes, TierStats
from server.batches.runner import BatchCounts
from server.cluster_stats import ClusterStats, WorkerStats
from server.config import ServerConfig
from server.metrics import metrics_text
from server.usage import TenantTotals

DEPLOY = Path(server.__file__).parent.parent / "deploy"
DASHBOARDS = [json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana").glob("*.json"))]
FLAGS = {
    "--" + field.name.replace("_", "-") for field in (*dataclasses.fields(ServerConfig), *flat_fields()) if "instead" not in field.metadata
}


@pytest.fixture(scope="module")
def exposition():
    """/metrics of a server that has everything there is to measure."""
    tiers = TierStats(**{name: 1 for name in TierStats.__slots__ if name != "refused"}, refused={"damaged": 1})
    stats = EngineStats(stage_times={"decode": [StageTimes(1.0, 1.0)]}, target_itl=0.05, finished={"stop": 1}, memory={"weights": 1})
    stats.read_tiers, stats.read_expert_loads = lambda: tiers, lambda: {"decode": ExpertLoad(1.0, 1.0, 1.0)}
    stats.inter_token_latency.observe(0.04)
    worker = WorkerStats(**dict.fromkeys(WorkerStats.__slots__, 1) | {"role": "both", "address": "127.0.0.1:1"})
    cluster = ClusterStats((worker,), 1, {"prefilled apart": 1})
    answered = {("POST", "/v1/completions", 200): 1}
    return metrics_text(stats, answered, {"anonymous": TenantTotals()}, BatchCounts(1, 1, 1), cluster)[0].decode()


def test_names_of_metrics_follow_prometheus_rules(exposition):
    """Those of `promtool check metrics`, as far as they apply here."""
    families = list(text_string_to_metric_families(exposition))
    assert len(families) > 50
    for family in families:
        name = family.name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), "neither colons nor capitals"
        assert family.documentation, name
        assert not name.endswith(("_total", "_count", "_sum", "_bucket")), f"{name} is no counter or part of a histogram"
        assert not re.search(rf"_{family.type}(_|$)", name), f"{name} names its type"
        assert not re.search(r"_(ms|milliseconds|minutes|hours|days|kb|mb|gb|kib|mib|gib|kilobytes|megabytes|percent)(_|$)", name), name
        if family.type == "counter":
            assert all(sample.name == f"{name}_total" for sample in family.samples)
        assert not {label for sample in family.samples for label in sample.labels if not re.fullmatch(r"[a-z][a-z0-9_]*", label)}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: the rules above stand in for it")
def test_promtool_finds_nothing(exposition):
    for command, text in (
        (["metrics"], exposition),
        (["rules", str(DEPLOY / "alerts.yaml")], ""),
        (["config", str(DEPLOY / "prometheus.yaml")], ""),
    ):
        done = subprocess.run(["promtool", "check", *command], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def expressions():
    targets = [target for dashboard in DASHBOARDS for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries = [variable["query"]["query"] for dashboard in DASHBOARDS for variable in dashboard["templating"]["list"]]
    rules = [rule["expr"] for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
    return [target["expr"] for target in targets] + queries + rules


def test_every_metric_of_dashboard_and_alerts_is_there_with_its_labels(exposition):
    labels = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    found = expressions()
    assert len(found) > 30
    for expression in found:
        names = re.findall(r"\b(?:jaxinfer|process)_[a-z0-9_]+", expression)
        assert names or expression.startswith("up{"), expression
        for name in names:
            assert name in labels, f"{name} of {expression} is not in /metrics"
        used = set(re.findall(r"(\w+)=~?\"", expression))
        used |= {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        known = {"instance", "job"}.union(*(labels[name] for name in names))
        assert used <= known, f"{used - known} of {expression} are no labels of it"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard["uid"])
def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for g in [panel["gridPos"]]
        for x in range(g["x"], g["x"] + g["w"])
        for y in range(g["y"], g["y"] + g["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard["uid"])
def test_grafana_knows_every_field(dashboard):
    """By its own library, which leaves out what its schema does not have."""
    register_default_plugins()
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))

    def check(given, found, where):
        if isinstance(given, dict):
            for name, value in given.items():
                assert name in found, f"{where}.{name} is no field of Grafana's"
                check(value, found[name], f"{where}.{name}")
        elif isinstance(given, list):
            for number, (value, other) in enumerate(zip(given, found, strict=True)):
                check(value, other, f"{where}[{number}]")
        else:
            assert given == found, where

    check(dashboard, kept, "")


def kubernetes():
    return {document["kind"]: document for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def test_every_flag_that_is_given_is_one():
    pod = kubernetes()["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["jaxinfer"]["command"]
    unit = re.search(r"^ExecStart=(.*?[^\\])\n", (DEPLOY / "jaxinfer.service").read_text(), re.M | re.S)[1].replace("\\\n", " ")
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)", (DEPLOY / "Dockerfile").read_text(), re.M)[1])
    for arguments in (pod, composed, shlex.split(unit), entry):
        flags = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
        assert flags and set(flags) <= FLAGS
    page = (DEPLOY.parent / "docs/running.md").read_text()
    ours = re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)
    assert set(ours) - FLAGS <= {"--build", "--build-arg", "--target", "--no-access-log"}  # of other commands, or turning one off


def test_probes_ask_what_the_server_answers(client):
    container = kubernetes()["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert {client.get(path).status_code for path in paths.values()} == {200}
    assert "/health'" in (DEPLOY / "Dockerfile").read_text()


def test_the_end_is_waited_for_longer_than_requests_get():
    grace = kubernetes()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    stop = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["jaxinfer"]["stop_grace_period"]
    unit = re.search(r"^TimeoutStopSec=(\d+)", (DEPLOY / "jaxinfer.service").read_text(), re.M)[1]
    assert min(grace, int(stop.removesuffix("s")), int(unit)) > ServerConfig().shutdown_timeout + 5


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_knows_every_line_of_the_unit(tmp_path):
    unit = tmp_path / "jaxinfer.service"
    unit.write_text((DEPLOY / "jaxinfer.service").read_text().replace("/opt/jaxinfer/bin/jaxinfer", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "jaxinfer.service" in line]
    assert (done.returncode, ours) == (0, [])
