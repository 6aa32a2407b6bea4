"""What --weights int8 costs the default model, on a text that people wrote."""

import pytest

from benchmarks.peers.quality import TEXT, compare_distributions
from jaxinfer.llm import LLM


@pytest.mark.exhaustive  # a minute; others compare integers with what they stand for
def test_the_default_model_loses_little(default_llm):
    integers = LLM(weights="int8", dtype="float32", max_batch_size=1, decode_buckets=(1,), prefill_chunk_size=32, prefill_buckets=(32,))
    tokens = default_llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:256]
    wide = default_llm.logits(tokens)
    here, there = compare_distributions(wide, [tokens]), compare_distributions(integers.logits(tokens), [tokens], wide)
    assert there.perplexity < here.perplexity * 1.02
    assert there.divergence < 0.02  # nats
    assert there.agreement > 0.9
