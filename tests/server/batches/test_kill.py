"""kill -9: whatever the moment, after the next start every line is answered exactly once, and nothing is left over."""

import json
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from signal import SIGKILL

import openai
import pytest

from server.batches.batch_store import BatchStore
from tests.server.batches.conftest import line
from tests.server.batches.forks import Forks
from tests.server.batches.life import NUM_LINES, TENANT, live_one_batch

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@pytest.mark.parametrize("end", ["completed", "cancelled", "expired"])
def test_a_store_killed_before_any_of_its_steps(forks, tmp_path, end):
    """The process is killed before its 1st, 2nd, 3rd... step until it outlives them all, and each time once more while it recovers."""
    crash_at = 0
    while True:
        crash_at += 1
        folder, acknowledged = tmp_path / str(crash_at), tmp_path / f"{crash_at}.txt"
        first = forks.wait(forks.start("live", str(folder), str(acknowledged), 1, crash_at, end))
        assert first in (0, -SIGKILL)
        assert forks.wait(forks.start("live", str(folder), str(acknowledged), 2, 3 + crash_at % 13, end)) in (0, -SIGKILL)
        check_recovered(folder, acknowledged, end)
        if first == 0:
            break
    assert crash_at > 15


def check_recovered(folder, acknowledged, end):
    store = BatchStore(folder)
    with open(acknowledged, "a") as noted:
        batch = live_one_batch(store, "3", end, noted.write)
    store.close()
    store = BatchStore(folder)  # which sweeps up
    num_answered = NUM_LINES if end == "completed" else 4
    assert (batch.status, batch.num_lines) == (end, NUM_LINES)
    assert (batch.num_completed, batch.num_failed) == (num_answered // 2, NUM_LINES - num_answered // 2)
    assert (batch.input_tokens, batch.cached_tokens, batch.output_tokens) == (3 * num_answered, 2 * num_answered, num_answered)
    contents = {}
    for id in (batch.output_file_id, batch.error_file_id):
        file = store.files.find(TENANT, id)
        raw = store.files.path(id).read_bytes()
        assert file.num_bytes == len(raw)
        contents[id] = [json.loads(line) for line in raw.splitlines()]
    answers = [answer for found in contents.values() for answer in found]
    assert sorted(answer["custom_id"] for answer in answers) == [f"c{n}" for n in range(NUM_LINES)]
    codes = {int(answer["id"].rpartition("_")[2]): answer["error"]["code"] for answer in answers}
    # What was acknowledged once is the answer: it was not asked again by a later process.
    noted = dict(json.loads(line) for line in acknowledged.read_text().splitlines())
    assert {number: code for number, code in codes.items() if not code.startswith("batch_")} == {
        n: codes[n] for n in range(1, num_answered + 1)
    }
    assert {number: codes[number] for number in noted} == noted
    assert {codes[n] for n in range(num_answered + 1, NUM_LINES + 1)} == ({f"batch_{end}"} if end != "completed" else set())
    kept, _ = store.files.page(TENANT, after=None, limit=10, ascending=True, purpose=None)
    assert {file.id for file in kept} == {batch.input_file_id, *contents} == set(os.listdir(folder / "files"))
    assert store._database.query("SELECT count(*) FROM lines")[0][0] == 0
    store.close()


def start_server(forks, folder, log):
    pid = forks.start("serve", str(folder), str(log))
    for _ in range(400):
        if log.exists() and (found := re.search(r"ready on (http://\S+)", log.read_text())):
            return pid, openai.OpenAI(base_url=found[1] + "/v1", api_key="none", max_retries=0)
        time.sleep(0.01)
    raise AssertionError(log.read_text())


@pytest.mark.parametrize(("seed", "most_killed"), [(0, 4), pytest.param(1, 15, marks=pytest.mark.exhaustive)])
def test_a_server_killed_again_and_again(forks, tmp_path, seed, most_killed):
    moments = random.Random(seed)
    lines = [line(f"c{n}", body={"model": "tiny", "prompt": "x", "max_tokens": n + 1}) for n in range(150)]
    lines.insert(70, line("bad", body={"model": "tiny", "prompt": "x", "max_tokens": 0}))
    file = batch = None
    num_killed = num_answered = 0
    progress = []
    while True:
        pid, api = start_server(forks, tmp_path / "batches", tmp_path / f"log{num_killed}")
        with api:
            killed_at = time.monotonic() + moments.uniform(0.0, 0.25) if num_killed < most_killed else float("inf")
            with suppress(openai.APIConnectionError):
                file = file or api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
                batch = batch or api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
                while time.monotonic() < killed_at:
                    batch = api.batches.retrieve(batch.id)
                    assert batch.request_counts.completed >= num_answered  # what was once told stays true
                    num_answered = batch.request_counts.completed
                    if batch.status == "completed":
                        break
            if batch is not None and batch.status == "completed":
                answers = [json.loads(answer) for answer in api.files.content(batch.output_file_id).text.splitlines()]
                [error] = [json.loads(answer) for answer in api.files.content(batch.error_file_id).text.splitlines()]
                break
            progress.append(num_answered)
            forks.kill(pid)
            num_killed += 1
            (tmp_path / f"log{num_killed}").unlink(missing_ok=True)
    forks.kill(pid)
    assert num_killed >= 3
    assert len(set(progress)) >= 3, progress
    assert [answer["custom_id"] for answer in answers] == [f"c{n}" for n in range(150)]
    assert error["custom_id"] == "bad"
    for n, answer in enumerate(answers):
        assert answer["response"]["body"]["choices"][0]["text"] == ("abcdefgh" * 20)[: n + 1]
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (151, 150, 1)
    assert batch.usage.output_tokens == sum(range(1, 151))
