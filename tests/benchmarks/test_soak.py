"""A soak's traffic against the real front, and a soak from end to end against the real server with a tiny model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.http_load import LoadOutcome, RequestRecord, open_session, send
from benchmarks.serving import parse_metrics
from benchmarks.soak_traffic import KINDS, LEAVING, SoakTraffic
from server.config import ServerConfig
from server.openai.app import create_app
from tests.server.fakes import MAX_MODEL_LEN, FakeBackend, byte_tokenizer
from tests.server.serving import served

LIMIT = 2**17


def traffic(seed: int = 0) -> SoakTraffic:
    return SoakTraffic("tiny", MAX_MODEL_LEN, LIMIT, (1_000, 31_000), seed)


@pytest.fixture
def front():
    """The HTTP front over a backend without a model, which takes any token a traffic may send."""
    tokenizer = byte_tokenizer()
    tokenizer.vocab_size = 32_000
    backend = FakeBackend(tokenizer)
    with served(create_app(backend, tokenizer, ServerConfig(served_model_name=("tiny",), max_body_size=str(LIMIT)))) as url:
        yield backend, url


def answers(url: str, sent) -> list[RequestRecord]:
    """All asked at once."""

    async def ask() -> list[RequestRecord]:
        async with open_session(url) as session:
            return await asyncio.gather(*(send(session, one.request) for one in sent))

    return asyncio.run(ask())


def test_every_bad_request_is_answered_with_the_status_it_deserves(front):
    _, url = front
    bad = traffic().bad()
    records = answers(url, bad)
    assert Counter(status for sent in bad for status in sent.statuses).keys() == {400, 404, 405, 413}
    wrong = [(sent.request.body[:80], r.status, r.message) for sent, r in zip(bad, records, strict=True) if not sent.is_right(r)]
    assert wrong == []


def test_every_kind_is_taken_and_answered_or_left(front):
    backend, url = front
    made = [traffic(seed).make(kind) for kind in KINDS if kind not in (*LEAVING, "bad") for seed in range(20)]
    records = answers(url, made)
    assert [r.message for r in records if r.outcome is not LoadOutcome.ANSWERED] == []
    assert len(backend.seen) == len(made)
    tiers = {sent.tier for sent in made}
    assert {"priority", "flex", None} <= tiers


def test_clients_that_leave_do_and_abort(front):
    backend, url = front
    backend.hold.clear()
    backend.hold_after = 5
    made = [traffic(seed).make("leaves early") for seed in range(3)]
    assert [r.outcome for r in answers(url, made)] == [LoadOutcome.LEFT] * 3
    half = traffic().make("half a body")
    assert answers(url, [half])[0].outcome is LoadOutcome.LEFT
    backend.hold.set()
    middle = next(s for s in (traffic(seed).make("leaves mid-stream") for seed in range(99)) if s.request.disconnects_after == 3)
    (record,) = answers(url, [middle])
    assert record.outcome is LoadOutcome.LEFT and len(record.arrivals) == 3


def test_traffic_is_of_every_kind_and_length_and_the_same_again():
    sent = list(islice(traffic(3), 2_000))
    assert [s.request for s in sent] == [s.request for s in islice(traffic(3), 2_000)]
    counts = Counter(s.kind for s in sent)
    assert counts.keys() == KINDS.keys()
    assert all(abs(counts[kind] / 20 - share) < 3 for kind, share in KINDS.items())
    bodies = [json.loads(s.request.body) for s in sent if s.kind == "stream"]
    lengths = sorted(len(body["prompt"]) for body in bodies)
    assert lengths[0] < 12 and lengths[-1] == MAX_MODEL_LEN // 2
    assert all(len(body["prompt"]) + body["max_tokens"] <= MAX_MODEL_LEN for body in bodies)
    beginnings = Counter(tuple(body["prompt"][:32]) for body in bodies if len(body["prompt"]) > 48)
    assert beginnings.most_common(1)[0][1] > 10  # shared prefixes


def test_the_time_is_spent_as_planned():
    full, loads = soak.plan(600, 3.0)
    assert full == 120
    assert [load for load, _ in loads] == [1.0, 3.0] * 4
    assert full + sum(seconds for _, seconds in loads) == pytest.approx(600)
    assert soak.plan(60, 2.0)[1] == [(1.0, pytest.approx(19.2)), (2.0, pytest.approx(28.8))]


def test_metrics_are_read_by_name_and_label():
    text = '# TYPE a gauge\na{mesh="decode"} 3\n# TYPE b counter\nb_total 2.5\n'
    assert parse_metrics(text) == {'a{mesh="decode"}': 3.0, "b_total": 2.5}


@pytest.mark.processes
def test_a_soak_from_end_to_end(tmp_path: Path, tiny_model_path: Path, capsys):
    """Some seconds of it: nothing may hang, break or leak; memory and throughput are not judged."""
    flags = (
        f"--model {tiny_model_path} --kv-memory 512KiB --max-batch-size 8 --decode-buckets 8 --prefill-buckets 128 --prefill-chunk-size 128 "
        "--max-queue-size 64 --max-body-size 1MiB"
    )
    output = tmp_path / "s.json"
    with pytest.raises(SystemExit) as end:
        soak.main(["--minutes", "0.05", "--serve", flags, "--token-ids", "5", "500", "--output", str(output)])
    result = json.loads(output.read_text())
    held = {check["name"]: check["is_met"] for check in result["checks"]}
    assert end.value.code == 0, (held, result["wrong"], capsys.readouterr().out)
    assert held.pop("memory flat") is None and held.pop("throughput at 3x overload") is None
    assert all(held.values()) and len(held) == 7
    counts = Counter({outcome: n for kinds in result["outcomes"].values() for outcome, n in kinds.items()})
    assert counts["answered"] + counts["left"] > 0
    tiers = result["by_tier"].values()
    assert sum(t["sent"] for t in tiers) == sum(sum(result["outcomes"][kind].values()) for kind in ("stream", "chat stream"))
    assert all(t["refused"] <= t["sent"] for t in tiers)
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "| no page lost" in output.with_suffix(".md").read_text()
