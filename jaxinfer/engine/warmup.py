"""First runs of all programs, before requests are accepted."""

from __future__ import annotations

import time

import jax

from jaxinfer.decode.batch import empty_batch as empty_decode_batch
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.prefill.batch import empty_batch as empty_prefill_batch
from jaxinfer.prefill.chunk_size import ChunkSizeController
from jaxinfer.prefill.runner import PrefillResult, PrefillRunner
from jaxinfer.programs.buckets import prefill_rows
from jaxinfer.sampling.params import neutral_rows
from jaxinfer.start_progress import StartProgress


def warm_up(prefill: PrefillRunner, decode: DecodeRunner, progress: StartProgress) -> None:
    """Run every program once, on a row that writes to the null page only. A program's first run touches its memory for
    the first time and takes hundreds of milliseconds more than the next; no request should pay for that. Prompt
    scoring is left out: few requests use it, and its first run takes as long as a whole prompt."""
    with progress.counted("warming up", len(prefill.buckets) + len(decode.buckets)) as done:
        for size in prefill.buckets:
            last_hidden = _run_full(prefill, size).last_hidden
            rows = neutral_rows(len(last_hidden))
            rows.temperature[0] = 1.0
            jax.block_until_ready((prefill.sample(last_hidden, rows).packed, prefill.repeat(last_hidden, 0)))
            done()
        prefill.copy_pages([NULL_PAGE], [NULL_PAGE])
        for size in decode.buckets:
            steps = empty_decode_batch(size, decode.num_slots, decode.num_groups)
            steps.slots[0] = 0  # a sequence that gets the slot later brings its own token
            rows = neutral_rows(size)
            jax.block_until_ready(decode.run(steps, decode.put(rows, steps.num_generated)))
            rows.temperature[0] = 1.0
            jax.block_until_ready(decode.run(steps, decode.put(rows, steps.num_generated)))
            done()
    prefill.count_tokens(0, (), 0)
    decode.count_tokens(0, (), 0)
    decode.assign_slot(0, ())


def measure(prefill: PrefillRunner, chunk_controller: ChunkSizeController) -> None:
    """Time each prefill program, the better of two runs, so that chunk sizes are right from the first request on."""
    for size in prefill.buckets:
        seconds = []
        for _ in range(2):
            started = time.monotonic()
            _run_full(prefill, size)
            seconds.append(time.monotonic() - started)
        chunk_controller.observe(size, min(seconds))


def _run_full(prefill: PrefillRunner, size: int) -> PrefillResult:
    batch = empty_prefill_batch(size, prefill_rows(size), prefill.table_width)
    packed = batch.packed
    packed.query_len[0] = packed.kv_len[0] = min(size, prefill.max_model_len)
    result: PrefillResult = jax.block_until_ready(prefill.run(batch))
    return result
