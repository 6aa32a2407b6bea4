"""What the store holds: each step of a batch's life, files and who may see them, and one process at a time."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.config import ConfigError
from server.batches.batch_store import WINDOW_SECONDS, Answer, BatchStore, UnknownFile
from server.cli import main
from tests.server.batches.conftest import line

ROOT = Path(__file__).parents[3]


def upload(store, *custom_ids, tenant="a", seconds=None):
    text = "\n".join(line(custom_id) for custom_id in custom_ids)
    return store.files.add(tenant, "in.jsonl", io.BytesIO(text.encode()), seconds)


def begun(store, *custom_ids, tenant="a"):
    batch = store.create(tenant, upload(store, *custom_ids, tenant=tenant).id, "/v1/completions", None, None)
    return store.validate(batch, 10_000)


def answer(batch, number, text="x", is_failure=False):
    return Answer(batch.id, number, f'{{"custom_id": "{number}", "text": "{text}"}}\n'.encode(), is_failure, 5, 2, 3)


def read(store, id):
    return [json.loads(text) for text in store.files.path(id).read_bytes().splitlines()]


def test_a_batch_goes_its_way(store, clock):
    file = upload(store, "a", "b", "c")
    batch = store.create("a", file.id, "/v1/completions", {"k": "v"}, 3600)
    assert (batch.status, batch.num_lines, batch.expires_at) == ("validating", 0, clock() + WINDOW_SECONDS)
    clock.seconds += 1
    batch = store.validate(batch, 10_000)
    assert (batch.status, batch.num_lines, batch.in_progress_at, batch.model) == ("in_progress", 3, clock(), "tiny")
    assert [place.number for place in store.unanswered(batch, 0)] == [1, 2, 3]
    store.keep([answer(batch, 2), answer(batch, 1, is_failure=True)])
    assert [place.number for place in store.unanswered(batch, 0)] == [3]
    assert store.unanswered(batch, 3) == []
    store.keep([answer(batch, 3)])
    clock.seconds += 1
    batch = store.finish(batch.id)
    assert (batch.status, batch.finalizing_at, batch.completed_at, batch.metadata) == ("completed", clock(), clock(), {"k": "v"})
    assert (batch.num_completed, batch.num_failed) == (2, 1)
    assert (batch.input_tokens, batch.cached_tokens, batch.output_tokens) == (15, 6, 9)
    assert [found["custom_id"] for found in read(store, batch.output_file_id)] == ["2", "3"]
    assert [found["custom_id"] for found in read(store, batch.error_file_id)] == ["1"]
    output = store.files.find("a", batch.output_file_id)
    assert (output.purpose, output.created_at, output.expires_at) == ("batch_output", clock(), clock() + 3600)
    assert store.open_batches() == []


def test_a_line_is_answered_once(store):
    batch = begun(store, "a")
    store.keep([answer(batch, 1, "first"), answer(batch, 1, "second")])
    store.keep([answer(batch, 1, "third", is_failure=True)])
    batch = store.finish(batch.id)
    assert (batch.num_completed, batch.num_failed, batch.output_tokens) == (1, 0, 3)
    assert [found["text"] for found in read(store, batch.output_file_id)] == ["first"]
    assert batch.error_file_id is None


def test_what_has_ended_takes_no_answer_and_ends_once(store):
    batch = begun(store, "a", "b")
    store.keep([answer(batch, 1)])
    cancelling = store.cancel("a", batch.id)
    assert (cancelling.status, cancelling.cancelling_at) == ("cancelling", store.now())
    store.keep([answer(batch, 2)])
    done = store.finish(batch.id)
    store.keep([answer(batch, 2)])
    assert (done.status, done.num_completed, done.num_failed) == ("cancelled", 1, 1)
    [error] = read(store, done.error_file_id)
    assert (error["custom_id"], error["error"]["code"], error["response"]) == ("b", "batch_cancelled", None)
    assert store.finish(batch.id) == done == store.cancel("a", batch.id) == store.validate(batch, 10_000)
    assert len(os.listdir(store.files.path(""))) == 3


def test_cancelled_before_it_was_read_through(store):
    batch = store.create("a", upload(store, "a").id, "/v1/completions", None, None)
    store.cancel("a", batch.id)
    assert store.validate(batch, 10_000).status == "cancelling"
    done = store.finish(batch.id)
    assert (done.status, done.num_lines, done.output_file_id, done.error_file_id) == ("cancelled", 0, None, None)


def test_what_is_not_answered_in_time_is_told_so(store):
    batch = begun(store, "a", "b", "c")
    store.keep([answer(batch, 2)])
    done = store.finish(batch.id)
    assert (done.status, done.expired_at, done.num_completed, done.num_failed) == ("expired", store.now(), 1, 2)
    errors = read(store, done.error_file_id)
    assert [(error["custom_id"], error["error"]["code"]) for error in errors] == [("a", "batch_expired"), ("c", "batch_expired")]
    assert errors[0]["id"] == f"batch_req_{batch.id.removeprefix('batch_')}_1"


def test_a_wrong_input_fails_the_batch_for_good(store):
    file = store.files.add("a", "in.jsonl", io.BytesIO(b"bad\n" + line("a").encode()), None)
    batch = store.validate(store.create("a", file.id, "/v1/completions", None, None), 10_000)
    assert (batch.status, batch.failed_at, batch.num_lines) == ("failed", store.now(), 0)
    assert [(error["code"], error["line"]) for error in batch.errors] == [("invalid_json_line", 1)]
    assert store.open_batches() == []
    assert store.finish(batch.id) == batch


def test_contents_that_somebody_removed_fail_the_batch(store):
    batch = store.create("a", upload(store, "a").id, "/v1/completions", None, None)
    store.files.path(batch.input_file_id).unlink()
    assert store.validate(batch, 10_000).errors[0]["code"] == "file_not_found"


def test_tenants_do_not_see_each_other(store):
    file, batch = upload(store, "a"), begun(store, "b", tenant="a")
    assert store.files.find("b", file.id) is None
    assert store.files.page("b", after=None, limit=10, ascending=True, purpose=None) == ([], False)
    assert not store.files.delete("b", file.id)
    assert store.find("b", batch.id) is None
    assert store.page("b", after=None, limit=10) == ([], False)
    assert store.cancel("b", batch.id) is None
    assert store.find("a", batch.id).status == "in_progress"
    with pytest.raises(UnknownFile):
        store.create("b", file.id, "/v1/completions", None, None)
    output = store.finish(batch.id).error_file_id
    assert store.files.find("a", output) is not None
    assert store.files.find("b", output) is None


def test_only_an_upload_can_be_asked(store):
    with pytest.raises(UnknownFile):
        store.create("a", store.finish(begun(store, "a").id).error_file_id, "/v1/completions", None, None)


def test_a_file_ends_when_its_time_is_over(store, clock):
    file, other = upload(store, "a", seconds=10), upload(store, "b")
    clock.seconds += 9
    assert store.files.find("a", file.id) == file
    clock.seconds += 1
    assert store.files.find("a", file.id) is None
    assert store.files.page("a", after=None, limit=10, ascending=True, purpose=None) == ([other], False)
    assert not store.files.delete("a", file.id)
    with pytest.raises(UnknownFile):
        store.create("a", file.id, "/v1/completions", None, None)
    store.files.remove_expired()
    assert os.listdir(store.files.path("")) == [other.id]


@pytest.mark.parametrize("how", ["deleted", "expired"])
def test_contents_stay_while_a_batch_reads_them(store, open_store, clock, how):
    file = upload(store, "a", "b", seconds=10)
    batch = store.create("a", file.id, "/v1/completions", None, None)
    if how == "deleted":
        assert store.files.delete("a", file.id)
    clock.seconds += 10
    store.files.remove_expired()
    store.close()
    store = open_store()  # which sweeps what nobody needs
    assert store.files.find("a", file.id) is None
    batch = store.validate(batch, 10_000)
    assert json.loads(store.request(batch, store.unanswered(batch, 0)[1]))["custom_id"] == "b"
    store.keep([answer(batch, 1), answer(batch, 2)])
    done = store.finish(batch.id)
    assert os.listdir(store.files.path("")) == [done.output_file_id]


def test_what_a_killed_upload_left_is_swept_up(store, open_store):
    kept = upload(store, "a")
    for name in ("file-unfinished.part", "file-without-a-row"):
        store.files.path(name).write_bytes(b"x")
    store.close()
    assert os.listdir(open_store().files.path("")) == [kept.id]


def test_an_upload_that_breaks_off_leaves_nothing(store):
    class Broken(io.BytesIO):
        def read(self, *_):
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        store.files.add("a", "in.jsonl", Broken(), None)
    assert os.listdir(store.files.path("")) == []
    assert store.files.page("a", after=None, limit=10, ascending=True, purpose=None) == ([], False)


def test_ids_sort_by_age_even_within_one_moment(store):
    ids = [store._database.new_id("batch_") for _ in range(1000)]
    assert ids == sorted(set(ids))


def test_a_folder_belongs_to_one_process(store, tmp_path):
    with pytest.raises(ConfigError, match="in use by another process"):
        BatchStore(tmp_path / "batches")
    script = "import sys; from pathlib import Path; from server.batches.batch_store import BatchStore; BatchStore(Path(sys.argv[1]))"
    other = [sys.executable, "-c", script, str(tmp_path / "batches")]
    refused = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "in use by another process" in refused.stderr
    store.close()
    subprocess.run(other, cwd=ROOT, check=True)


def test_serve_says_so_in_one_line_before_the_long_start(store, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--batch-dir", str(tmp_path / "batches")])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"jaxinfer: error: \S*batches.sqlite3 is in use by another process: .*", said[-1])
    assert not [line for line in said[:-1] if "INFO uvicorn" not in line]


def test_a_folder_that_is_something_else_is_refused_in_words(tmp_path):
    (tmp_path / "batches.sqlite3").write_bytes(b"my diary" * 200)
    with pytest.raises(ConfigError, match="is not a database"):
        BatchStore(tmp_path)
    assert (tmp_path / "batches.sqlite3").read_bytes() == b"my diary" * 200


def test_a_folder_of_another_version_is_left_alone(open_store):
    store = open_store()
    store._database.connection.execute("PRAGMA user_version = 9")
    store.close()
    with pytest.raises(ConfigError, match="version 9"):
        open_store()


def test_answers_are_on_the_disk_when_they_are_acknowledged(store):
    """FULL: the write-ahead log is synced at each commit, not only now and then."""
    assert [store._database.query(f"PRAGMA {name}")[0][0] for name in ("journal_mode", "synchronous")] == ["wal", 2]
