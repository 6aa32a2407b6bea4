"""A batch's life without a server: what the runner does with a store, a step at a time, from wherever the batch is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

from server.batches.batch_store import Answer, BatchStore, StoredBatch, answer_id
from server.batches.lines import encoded, no_answer, read_line
from tests.server.batches.conftest import line

TENANT = "key-a"
NUM_LINES = 6
TEXT = "\n".join(line(f"c{n}") for n in range(NUM_LINES))


def live_one_batch(store: BatchStore, run: str, end: str, note: Callable[[str], object]) -> StoredBatch:
    """Upload, create, answer and finish, each unless it is done. Half of the answers are errors. `end`: "cancelled" and "expired" come
    after four lines."""
    [batches, _] = store.page(TENANT, after=None, limit=10)
    if not batches:
        files, _ = store.files.page(TENANT, after=None, limit=10, ascending=True, purpose=None)
        file = files[0] if files else store.files.add(TENANT, "in.jsonl", io.BytesIO(TEXT.encode()), None)
        batches = [store.create(TENANT, file.id, "/v1/completions", None, None)]
    batch = batches[0]
    if batch.status == "validating":
        batch = store.validate(batch, 1 << 20)
    if batch.status == "in_progress":
        while places := store.unanswered(batch, 0, limit=2):
            if places[0].number > 4 and end != "completed":
                if end == "cancelled":
                    store.cancel(TENANT, batch.id)
                else:
                    store.now = store.files._now = lambda: batch.expires_at + 1.0
                break
            answers = []
            for place in places:
                custom_id, _ = read_line(store.request(batch, place))
                answer = no_answer(answer_id(batch.id, place.number), custom_id, run, "as if it were an answer")
                answers.append(Answer(batch.id, place.number, encoded(answer), place.number % 2 == 1, 3, 2, 1))
            store.keep(answers)
            note("".join(json.dumps([answer.number, run]) + "\n" for answer in answers))
    return store.finish(batch.id)
