"""A tiny encoder's embeddings are the reference's, whatever else is in the batch and however many devices there are."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxinfer.config import ConfigError
from jaxinfer.request import RequestError
from tests import tiny_encoder
from tests.golden import embeddings
from tests.tiny_encoder import HIDDEN, MAX_TOKENS, VOCAB

GOLDEN = embeddings.load()
TOKENS = tiny_encoder.token_lists()


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize(("pooling", "devices"), [("mean", (0,)), ("mean", (0, 1)), ("cls", (3, 2, 1, 0))])
def test_embeddings_are_the_references_on_any_number_of_devices(embedders, pooling, devices):
    expected = GOLDEN.tiny_mean if pooling == "mean" else GOLDEN.tiny_first
    plain = embedders(pooling, normalizes=False, prefill_devices=devices, decode_devices=devices)
    np.testing.assert_allclose(plain.embed(TOKENS), expected, atol=2e-5)


def test_a_model_with_normalize_gives_embeddings_of_length_1(embedders, embedder):
    np.testing.assert_allclose(embedder.embed(TOKENS), unit(GOLDEN.tiny_mean), atol=1e-5)
    lengths = np.linalg.norm(embedders(normalizes=False, prefill_devices=(0,), decode_devices=(0,)).embed(TOKENS), axis=1)
    assert (np.abs(lengths - 1) > 0.1).any()


def test_bfloat16_weights_come_close(embedders):
    rounded = embedders(dtype="bfloat16").embed(TOKENS)
    assert not np.array_equal(rounded, embedders().embed(TOKENS))
    assert embeddings.cosines(rounded, GOLDEN.tiny_mean).min() > 0.999


def test_a_texts_embedding_does_not_depend_on_what_it_is_batched_with(embedder):
    alone = np.concatenate([embedder.embed([token_ids]) for token_ids in TOKENS])
    order = np.random.default_rng(0).permutation(len(TOKENS) * 20) % len(TOKENS)
    together = embedder.embed([TOKENS[number] for number in order])
    np.testing.assert_allclose(together, alone[order], atol=1e-5)


def test_texts_and_their_token_ids_give_the_same(embedder):
    texts = ["Hello, world!", "a", "", "?" * 40]
    del texts[2]
    ids = [embedder.tokenizer.encode(text) for text in texts]
    assert ids[0][0] == 2 and ids[0][-1] == 3  # [CLS] and [SEP]
    assert np.array_equal(embedder.embed(texts), embedder.embed(ids))
    assert np.array_equal(embedder.embed(texts[0]), embedder.embed(ids[0]))
    assert embedder.embed("HELLO, world!").tolist() == embedder.embed(ids[0]).tolist()
    assert embedder.embed([]).shape == (0, HIDDEN)


def test_dimensions_cut_and_bring_to_length_1_again(embedder, embedders):
    whole = embedder.embed(TOKENS)
    np.testing.assert_allclose(embedder.embed(TOKENS, dimensions=7), unit(whole[:, :7]), atol=1e-6)
    assert np.array_equal(embedder.embed(TOKENS, dimensions=HIDDEN), whole)
    assert embedder.embed([], dimensions=7).shape == (0, 7)
    for dimensions in (0, -3, HIDDEN + 1):
        with pytest.raises(RequestError, match=f"dimensions is {dimensions}: this model's embeddings have {HIDDEN}"):
            embedder.embed(["a"], dimensions=dimensions)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            [[2] * MAX_TOKENS, [2] * (MAX_TOKENS + 1)],
            rf"texts\[1\] has {MAX_TOKENS + 1} tokens: the embedding model takes at most {MAX_TOKENS}",
        ),
        (["a" * MAX_TOKENS + "!" * 3], f"texts has {MAX_TOKENS + 5} tokens"),
        (["a", ""], r"texts\[1\] is empty"),
        ([[1], []], r"texts\[1\] is empty"),
        ([[1], [VOCAB]], rf"texts\[1\] has token id {VOCAB}: this model's are 0 to {VOCAB - 1}"),
        ([[1], [-1]], "token id -1"),
        ([[1], [1.0]], "token id 1.0"),
        (["a", "\ud83d"], r"texts\[1\]: .*surrogate"),
    ],
)
def test_texts_that_can_not_be_embedded_are_named(embedder, texts, message):
    before = embedder.stats.num_embedded_texts
    with pytest.raises(RequestError, match=message):
        embedder.embed(texts)
    assert embedder.stats.num_embedded_texts == before
    assert embedder.embed(["a"]).shape == (1, HIDDEN)


def test_nothing_compiles_after_ready_and_texts_are_counted(embedder):
    stats = embedder.stats
    texts, tokens = stats.num_embedded_texts, stats.num_embedded_tokens
    for number in range(1, 40, 3):
        embedder.embed(TOKENS * number)
    embedder.embed([[2, 3]] * 300)
    for token_ids in TOKENS:
        embedder.embed([token_ids])
    assert stats.num_compilations_after_ready == 0
    num_rounds = sum(range(1, 40, 3)) + 1
    assert stats.num_embedded_texts - texts == num_rounds * len(TOKENS) + 300
    assert stats.num_embedded_tokens - tokens == num_rounds * sum(map(len, TOKENS)) + 600
    assert stats.num_programs == 5  # rows of 32, 64 and 70 places, one or as many as make up a step
    assert stats.memory["embedding weights"] > 40_000


def test_an_interrupted_call_leaves_nothing_behind(embedder, monkeypatch):
    worker = embedder._worker
    step, num_steps = worker.step, 0

    def interrupted(**how):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.5)  # for the main thread to see it before the texts are done
        return step(**how)

    monkeypatch.setattr(worker, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedder.embed(TOKENS * 50)
    expected = unit(GOLDEN.tiny_mean)
    np.testing.assert_allclose(embedder.embed(TOKENS[::-1]), expected[::-1], atol=1e-5)


def test_any_number_of_threads_get_their_own(embedder):
    expected = unit(GOLDEN.tiny_mean)
    with ThreadPoolExecutor(6) as pool:
        rows = list(pool.map(lambda number: embedder.embed(TOKENS[number % len(TOKENS)]), range(60)))
    np.testing.assert_allclose(np.concatenate(rows), np.stack([expected[i % len(TOKENS)] for i in range(60)]), atol=1e-5)


def test_settings_are_the_engines(embedders):
    with pytest.raises(ConfigError, match="unknown setting 'dtyp'"):
        embedders(dtyp="float32")
    with pytest.raises(ConfigError, match=r"prefill_devices is .*device 9 does not exist"):
        embedders(prefill_devices=(9,))
    with pytest.raises(ConfigError, match=r"prefill_devices is .*heads axis of 4 can't be split over 3 devices"):
        embedders(prefill_devices=(0, 1, 2), decode_devices=(0, 1, 2))
