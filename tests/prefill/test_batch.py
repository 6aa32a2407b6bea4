import numpy as np

from jaxinfer.prefill.batch import build_batch
from jaxinfer.prefill.scheduler import Chunk
from tests import sequences


def test_chunks_are_packed_at_whole_tiles():
    first, second = sequences.make(40, temperature=0.0), sequences.make(100, temperature=0.5, top_k=3, prompt_logprobs=1)
    first.prefill.pages, second.prefill.pages = [4, 5, 6], list(range(10, 17))
    batch = build_batch([Chunk(first, 0, 40, True, 0), Chunk(second, 64, 20, False, 0)], 128, 9)
    assert batch.packed.query_start.tolist() == [0, 64, 0, 0]
    assert batch.packed.query_len.tolist() == [40, 20, 0, 0]
    assert batch.packed.kv_len.tolist() == [40, 84, 0, 0]
    assert batch.packed.token_ids[:40].tolist() == first.token_ids
    assert batch.packed.token_ids[64:84].tolist() == second.token_ids[64:84]
    assert not batch.packed.token_ids[40:64].any()
    assert batch.next_token_ids[:39].tolist() == first.token_ids[1:]
    assert batch.next_token_ids[64:84].tolist() == second.token_ids[65:85]
    assert batch.packed.page_table[0].tolist() == [4, 5, 6, 0, 0, 0, 0, 0, 0]
    assert batch.packed.page_table[1].tolist() == [*range(10, 17), 0, 0]
    assert bool(batch.wants_prompt_logprobs)


def test_only_rows_that_sample_carry_their_parameters():
    done, going_on = sequences.make(40, temperature=0.9, logprobs=2), sequences.make(100, temperature=0.5, logprobs=2)
    done.token_ids += [1, 2]  # generated before it was preempted
    batch = build_batch([Chunk(done, 0, 42, True, 0), Chunk(going_on, 0, 32, False, 0)], 128, 9)
    np.testing.assert_array_equal(batch.sampling.temperature, np.float32([0.9, 0, 0, 0]))
    assert batch.sampling.wants_logprobs.tolist() == [True, False, False, False]
    assert batch.num_generated.tolist() == [2, 0, 0, 0]
    assert not batch.wants_prompt_logprobs


def test_a_prompt_is_scored_once():
    sequence = sequences.make(40, prompt_logprobs=0)
    chunk = Chunk(sequence, 0, 40, True, 0)
    assert build_batch([chunk], 128, 9).wants_prompt_logprobs
    sequence.prefill.prompt_logprobs = [None] * 40
    assert not build_batch([chunk], 128, 9).wants_prompt_logprobs
