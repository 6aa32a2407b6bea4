"""The official `openai` client's files and batches against a real server on a socket."""

import json
import time

import openai
import pytest

from server.openai.app import create_app
from tests.server.batches.conftest import CHAT, line
from tests.server.fakes import ANSWER
from tests.server.serving import served


@pytest.fixture
def api(backend, tokenizer, config, store):
    with (
        served(create_app(backend, tokenizer, config, store=store)) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


def ended(api, batch):
    for _ in range(500):
        batch = api.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def test_a_batch_from_upload_to_output(api):
    lines = [line(f"c{n}", "/v1/chat/completions", CHAT) for n in range(20)]
    lines.append(line("bad", "/v1/chat/completions", CHAT | {"temperature": -1}))
    file = api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    assert (file.filename, file.purpose, file.status) == ("in.jsonl", "batch", "processed")
    assert file.bytes == len("\n".join(lines))
    batch = api.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"made by": "a test"}
    )
    assert batch.status == "validating"
    done = ended(api, batch)
    assert (done.status, done.model, done.metadata) == ("completed", "tiny", {"made by": "a test"})
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (21, 20, 1)
    assert done.usage.output_tokens == 20 * len(ANSWER.encode())
    answers = [json.loads(answer) for answer in api.files.content(done.output_file_id).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"c{n}" for n in range(20)]
    assert {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers} == {ANSWER}
    [error] = [json.loads(answer) for answer in api.files.content(done.error_file_id).iter_lines()]
    assert (error["custom_id"], error["response"]["status_code"], error["error"]) == ("bad", 400, None)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert api.files.retrieve(done.output_file_id).purpose == "batch_output"


def test_lists_go_on_page_after_page_even_after_what_was_deleted_meanwhile(api):
    ids = [api.files.create(file=(f"{n}.jsonl", line("a").encode()), purpose="batch").id for n in range(7)]
    assert [file.id for file in api.files.list(limit=3)] == ids[::-1]
    assert [file.id for file in api.files.list(limit=3, order="asc")] == ids
    batches = [api.batches.create(input_file_id=id, endpoint="/v1/completions", completion_window="24h").id for id in ids]
    assert [batch.id for batch in api.batches.list(limit=2)] == batches[::-1]
    for batch in api.batches.list():
        ended(api, batch)
    deleted = [api.files.delete(file.id) for file in api.files.list(limit=3, purpose="batch")]
    assert [answer.id for answer in deleted if answer.deleted] == ids[::-1]
    assert {file.purpose for file in api.files.list()} == {"batch_output"}


def test_a_batch_that_is_cancelled_keeps_what_was_answered(api, backend):
    backend.hold.clear()
    backend.hold_after = 4
    file = api.files.create(file=("in.jsonl", "\n".join(line(str(n)) for n in range(30)).encode()), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while not backend.num_open:
        time.sleep(0.01)
    cancelled = api.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    done = ended(api, batch)
    assert (done.status, done.output_file_id, done.request_counts.failed) == ("cancelled", None, 30)
    assert backend.num_open == 0
    codes = [json.loads(answer)["error"]["code"] for answer in api.files.content(done.error_file_id).text.splitlines()]
    assert codes == ["batch_cancelled"] * 30
    with pytest.raises(openai.ConflictError, match="'cancelled'"):
        api.batches.cancel(batch.id)


def test_errors_are_the_clients_own(api):
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve("file-none")
    with pytest.raises(openai.NotFoundError):
        api.files.content("file-none")
    with pytest.raises(openai.NotFoundError):
        api.batches.cancel("batch_none")
    with pytest.raises(openai.BadRequestError) as bad:
        api.batches.create(input_file_id="file-none", endpoint="/v1/completions", completion_window="24h")
    assert bad.value.param == "input_file_id"
    with pytest.raises(openai.BadRequestError) as bad:
        api.files.create(file=("a", b"x"), purpose="fine-tune")
    assert bad.value.param == "purpose"


def test_what_a_file_is_kept_for_is_the_clients_choice(api, clock):
    kept = {"anchor": "created_at", "seconds": 3600}
    assert api.files.create(file=("a", b"x"), purpose="batch", expires_after=kept).expires_at == clock() + 3600
    assert api.files.create(file=("a", b"x"), purpose="batch").expires_at == clock() + 30 * 24 * 3600
    file = api.files.create(file=("a", line("a").encode()), purpose="batch")
    made = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    with_end, without = api.batches.create(**made, output_expires_after=kept), api.batches.create(**made)
    ends = [api.files.retrieve(ended(api, batch).output_file_id).expires_at for batch in (with_end, without)]
    assert ends == [clock() + 3600, None]
