"""The sampler against a plain model of it, on one device and with the vocabulary split over several."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec, reshard

from jaxinfer.layers.argmax import argmax_of_columns, argmax_of_rows
from jaxinfer.layers.vocabulary import VocabShard, shard_over_vocab
from jaxinfer.programs.buckets import bucket_for
from jaxinfer.request import RequestError, SamplingParams
from jaxinfer.sampling import sampler
from jaxinfer.sampling.logprob_readback import read_logprob
from jaxinfer.sampling.params import neutral_rows, set_row
from jaxinfer.sampling.penalties import add_sampled, penalize
from jaxinfer.sampling.sampler import Sampled, pick, sample_from_logits
from jaxinfer.sampling.token_counts import TokenCounts, reset, reset_arguments
from sharding.mesh import TENSOR, make_mesh
from tests.sampling.plain_sampler import adjusted, probabilities

VOCAB = 300  # neither a multiple of the sampler's lanes nor within one run of them
DRAWS = 8192
SIZES = (64, DRAWS)  # of batches: for each the sampler is compiled
END_TOKENS = [7, 299]


WAYS = ["whole", "whole, as on a GPU", "three parts"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test by every way; one of them, in turn, is not for a release alone."""
    tests = sorted(name for name in vars(metafunc.module) if name.startswith("test_"))
    kept = tests.index(metafunc.function.__name__) % len(WAYS)
    ways = [pytest.param(way, marks=() if index == kept else pytest.mark.exhaustive) for index, way in enumerate(WAYS)]
    metafunc.parametrize("num_parts", ways, indirect=True)


@pytest.fixture(autouse=True)
def num_parts(request, monkeypatch):
    """Over how many devices the vocabulary is split."""
    if request.param == "whole, as on a GPU":
        monkeypatch.setattr(sampler, "target_device", lambda: SimpleNamespace(platform="gpu"))
    if request.param != "three parts":
        yield 1
        return
    with jax.set_mesh(make_mesh(range(3))):
        yield 3


def split(arrays, dimension: int = 1):
    """Along their vocabulary."""
    is_one = jax.sharding.get_abstract_mesh().empty
    return arrays if is_one else reshard(arrays, PartitionSpec(*[None] * dimension, TENSOR))


@cache
def program(platform: str):
    """The sampler as it is traced for this platform. JAX's own cache tells meshes apart, and not what a test stands in for."""

    @jax.jit
    def on_platform(logits, rows, num_generated, counts, newest):
        """Each row in the slot of its own number."""
        return sample_from_logits(split(logits), rows, num_generated, split(counts), jnp.arange(len(logits)), newest)

    return on_platform


def run(logits, rows, num_generated, counts, newest):
    return program(sampler.target_device().platform)(logits, rows, num_generated, counts, newest)


def rows_of(params: list[SamplingParams], seeds: list[int], bans=(), size: int | None = None):
    rows = neutral_rows(size or len(params))
    for row, (of_row, seed) in enumerate(zip(params, seeds, strict=True)):
        set_row(rows, row, of_row, seed, END_TOKENS, bans)
    return rows


def counts_of(prompts: list[list[int]], outputs: list[list[int]]) -> TokenCounts:
    prompt, output = np.zeros((len(prompts), VOCAB), bool), np.zeros((len(prompts), VOCAB), np.int32)
    for row, (of_prompt, of_output) in enumerate(zip(prompts, outputs, strict=True)):
        prompt[row, of_prompt] = True
        np.add.at(output[row], of_output, 1)
    return TokenCounts(jnp.asarray(prompt), jnp.asarray(output))


def sampled(
    logits, params: list[SamplingParams], seeds: list[int] | None = None, prompts=None, outputs=None, bans=(), size=None
) -> Sampled:
    """In a batch of this size, or of one of SIZES: rows that are not used fill it up, as they do in an engine."""
    num_rows = len(params)
    size = size or bucket_for(num_rows, SIZES)
    unused = [[]] * (size - num_rows)
    prompts, outputs = ([*(of_rows or [[]] * num_rows), *unused] for of_rows in (prompts, outputs))
    generated = np.array([len(output) for output in outputs], np.int32)
    newest = np.array([output[-1] if output else 0 for output in outputs], np.int32)
    rows = rows_of(params, seeds or list(range(num_rows)), bans, size)
    filled_up = np.concatenate([logits, np.zeros((size - num_rows, VOCAB), np.float32)])
    return Sampled(run(jnp.asarray(filled_up), rows, generated, counts_of(prompts, outputs), newest).packed[:num_rows])


def draws(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One token for each of DRAWS seeds from the same logits."""
    return np.asarray(sampled(np.tile(logits, (DRAWS, 1)), [params] * DRAWS).tokens)


def random_logits(seed: int, scale: float = 2.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


def test_greedy_is_the_first_largest_logit():
    random = np.random.default_rng(0)
    logits = random.integers(-3, 4, (64, VOCAB)).astype(np.float32)  # many ties
    logits[random.random(logits.shape) < 0.1] = -np.inf
    np.testing.assert_array_equal(jax.jit(lambda x: argmax_of_rows(split(x)))(logits), logits.argmax(1))
    np.testing.assert_array_equal(jax.jit(lambda x: argmax_of_columns(split(x, 0)))(logits.T), logits.argmax(1))
    np.testing.assert_array_equal(sampled(logits, [SamplingParams(temperature=0.0)] * 64).tokens, logits.argmax(1))


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    logits = np.stack([random_logits(i) for i in range(64)])
    params = [SamplingParams(temperature=0.0 if i % 2 else 1.5) for i in range(64)]
    tokens = np.asarray(sampled(logits, params).tokens)
    np.testing.assert_array_equal(tokens[1::2], logits[1::2].argmax(1))
    assert np.any(tokens[::2] != logits[::2].argmax(1))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 9},
        {"top_k": 500},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 12, "min_p": 0.15},
        {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.08},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_and_keep_to_its_tokens(options):
    params = SamplingParams(**options)
    logits = random_logits(3)
    logits[[11, 200]] = logits[50]  # a tie, across runs of lanes
    expected = probabilities(logits.astype(np.float64), params)
    counts = np.bincount(draws(logits, params), minlength=VOCAB)
    assert not counts[expected == 0].any(), "a token outside what was to be kept"
    assert counts[expected * DRAWS > 25].all(), "a token that was to be kept never came"
    # Pearson's test over the tokens often enough expected, the others in one class.
    often = expected * DRAWS >= 5
    observed, wanted = np.append(counts[often], counts[~often].sum()), np.append(expected[often], expected[~often].sum()) * DRAWS
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    assert ((observed - wanted) ** 2 / wanted).sum() < freedom + 4 * np.sqrt(2 * freedom)


def test_equal_scores_at_the_edge_stay_or_go_together():
    logits = np.full(VOCAB, -5.0, np.float32)
    logits[[3, 150, 290]] = 1.0
    assert set(draws(logits, SamplingParams(top_k=2)).tolist()) == {3, 150, 290}
    assert set(draws(logits, SamplingParams(top_p=0.5)).tolist()) == {3, 150, 290}


def test_no_temperature_is_too_low():
    logits = np.stack([random_logits(i, scale=20.0) for i in range(4)])
    for temperature in (1e-3, 1e-30, 1e-44, 5e-324):
        np.testing.assert_array_equal(sampled(logits, [SamplingParams(temperature=temperature)] * 4).tokens, logits.argmax(1))


def test_a_seed_gives_its_tokens_whatever_else_is_in_the_batch():
    logits = np.stack([random_logits(i) for i in range(64)])
    params = [SamplingParams(temperature=1.2, top_p=0.95) for _ in range(64)]
    outputs = [[5] * (i % 7) for i in range(64)]
    seeds = [(i * 0x9E3779B97F4A7C15) % 2**64 for i in range(64)]
    tokens = np.asarray(sampled(logits, params, seeds, outputs=outputs).tokens)
    order = np.random.default_rng(0).permutation(64)
    shuffled = sampled(logits[order], [params[i] for i in order], [seeds[i] for i in order], outputs=[outputs[i] for i in order])
    np.testing.assert_array_equal(shuffled.tokens, tokens[order])
    # Beside rows that switch on everything else.
    mixed = params[:4] + [SamplingParams(top_k=3, min_p=0.1, frequency_penalty=1.0, logit_bias={3: 2.0}, logprobs=2)] * 60
    np.testing.assert_array_equal(sampled(logits, mixed, seeds, outputs=outputs).tokens[:4], tokens[:4])
    alone = sampled(logits[9:10], params[:1], seeds[9:10], outputs=outputs[9:10], size=1)
    assert alone.tokens[0] == tokens[9]


def test_seeds_and_places_in_the_text_draw_independently():
    logits = np.zeros((DRAWS, VOCAB), np.float32)
    by_seed = np.asarray(sampled(logits, [SamplingParams()] * DRAWS).tokens)
    by_place = np.asarray(
        run(
            logits,
            rows_of([SamplingParams()] * DRAWS, [5] * DRAWS),
            np.arange(DRAWS, dtype=np.int32),
            counts_of([[]] * DRAWS, [[]] * DRAWS),
            np.zeros(DRAWS, np.int32),
        ).tokens
    )
    high = np.asarray(sampled(logits, [SamplingParams()] * DRAWS, [i << 32 for i in range(DRAWS)]).tokens)
    for tokens in (by_seed, by_place, high):
        assert len(set(tokens.tolist())) == VOCAB
        assert abs(np.corrcoef(tokens[:-1], tokens[1:])[0, 1]) < 0.05
    assert np.mean(by_seed == high) < 0.02


def test_penalties_and_biases_change_the_scores_as_defined():
    random = np.random.default_rng(1)
    size = 64
    logits = np.stack([random_logits(i) for i in range(size)])
    params = [
        SamplingParams(
            temperature=0.0,
            repetition_penalty=float(random.choice([1.0, 0.5, 1.3, 4.0])),
            presence_penalty=float(random.choice([0.0, -1.5, 2.0])),
            frequency_penalty=float(random.choice([0.0, -0.7, 1.1])),
            logit_bias={int(t): float(b) for t, b in zip(random.integers(0, VOCAB, 40), random.normal(0, 3, 40), strict=True)},
            min_tokens=int(random.choice([0, 12])),
            max_tokens=20,
        )
        for _ in range(size)
    ]
    prompts = [random.integers(0, VOCAB, 30).tolist() for _ in range(size)]
    best = [int(of_row.argmax()) for of_row in logits]
    outputs = [[best[i]] * (i % 3) + random.integers(0, VOCAB, 10).tolist() for i in range(size)]
    expected = [adjusted(*row, END_TOKENS).argmax() for row in zip(logits, params, prompts, outputs, strict=True)]
    tokens = np.asarray(sampled(logits, params, prompts=prompts, outputs=outputs).tokens)
    np.testing.assert_array_equal(tokens, expected)
    assert np.mean(tokens == best) < 0.7, "the penalties decide most rows"


def test_each_penalty_takes_from_a_score_what_its_count_calls_for():
    params = [SamplingParams(presence_penalty=0.5), SamplingParams(frequency_penalty=0.5), SamplingParams(repetition_penalty=1.5)]
    logits = np.stack([random_logits(i) for i in range(3)])
    prompts, outputs = [[4, 5, 299]] * 3, [[5, 6, 6, 6, 150, 299, 299]] * 3
    penalized = jax.jit(lambda logits, counts, rows: penalize(split(logits), split(counts), jnp.arange(3), rows))
    scores = penalized(jnp.asarray(logits), counts_of(prompts, outputs), rows_of(params, [0] * 3))
    expected = [adjusted(*row, []) for row in zip(logits, params, prompts, outputs, strict=True)]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


def test_nothing_ends_before_min_tokens_and_anything_may_after():
    logits = random_logits(2)
    logits[END_TOKENS] = 50.0
    params = SamplingParams(temperature=0.0, min_tokens=3, max_tokens=9, logit_bias={END_TOKENS[0]: 100.0})
    for num_output in range(5):
        token = int(sampled(logits[None], [params], outputs=[[0] * num_output]).tokens[0])
        assert (token in END_TOKENS) == (num_output >= 3)
        drawn = sampled(np.tile(logits, (64, 1)), [SamplingParams(min_tokens=3)] * 64, outputs=[[0] * num_output] * 64)
        assert np.isin(drawn.tokens, END_TOKENS).all() if num_output >= 3 else not np.isin(drawn.tokens, END_TOKENS).any()


def test_as_many_biases_as_are_allowed_all_count():
    logits = np.zeros((1, VOCAB), np.float32)
    params = SamplingParams(temperature=0.0, logit_bias={t: -1.0 - t / 1000 for t in range(VOCAB)}, min_tokens=2)
    assert len(params.logit_bias) == 300
    assert int(sampled(logits, [params]).tokens[0]) == 0
    banned = SamplingParams(temperature=0.0, logit_bias={t: -100.0 for t in range(VOCAB) if t != 123})
    assert int(sampled(logits, [banned]).tokens[0]) == 123
    with pytest.raises(RequestError, match="logit_bias has 301 entries: at most 300"):
        SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0))


ALLOWED = (3, 7, 120, 299)  # of all three parts, two of them end tokens


def test_restricted_rows_keep_to_what_is_allowed_and_others_are_as_without():
    logits = np.stack([random_logits(i) for i in range(512)])
    kinds = [{"temperature": 0.0}, {}, {"top_k": 9, "min_p": 0.01}, {"top_p": 0.5}]
    params = [SamplingParams(**kinds[i // 2 % 4], allowed_token_ids=ALLOWED if i % 2 else None, logprobs=0) for i in range(512)]
    result = sampled(logits, params)
    tokens = np.asarray(result.tokens)
    best = np.array(ALLOWED)[logits[:, ALLOWED].argmax(1)]
    np.testing.assert_array_equal(tokens[1::8], best[1::8])
    assert set(tokens[1::2]) == set(ALLOWED)
    plain = sampled(logits, [SamplingParams(**kinds[i // 2 % 4]) for i in range(512)])
    np.testing.assert_array_equal(tokens[::2], np.asarray(plain.tokens)[::2])
    own = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))  # not renormalised over what is allowed
    np.testing.assert_allclose(result.logprobs, own[np.arange(512), tokens], atol=1e-5)


def test_what_is_allowed_may_be_biased_and_held_back():
    logits = np.zeros((1, VOCAB), np.float32)
    bias = {3: -1.0, 120: 2.0, 299: 3.0, 50: 100.0}
    params = SamplingParams(temperature=0.0, allowed_token_ids=ALLOWED, logit_bias=bias, min_tokens=2)
    assert [int(sampled(logits, [params], outputs=[[9] * count]).tokens[0]) for count in (1, 2)] == [120, 299]


def test_bans_hold_always_or_after_a_token_and_never_leave_nothing():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, [200, 100, 10, 11]] = [8.0, 6.0, 4.0, 2.0]
    bans = [(200, None), (100, 5), (10, 6)]
    greedy = [SamplingParams(temperature=0.0)] * 3
    assert sampled(logits, greedy, outputs=[[5], [5, 6], [7]], bans=bans).tokens.tolist() == [10, 100, 100]
    drawn = sampled(np.tile(logits[:1], (512, 1)), [SamplingParams()] * 512, outputs=[[5]] * 512, bans=bans)
    assert not np.isin(drawn.tokens, [200, 100]).any() and np.isin(drawn.tokens, [10]).any()
    for temperature in (0.0, 1.0):  # what is not allowed is worse than what is banned
        only = [SamplingParams(temperature=temperature, allowed_token_ids=(100, 200))] * 3
        assert set(sampled(logits, only, outputs=[[5]] * 3, bans=bans).tokens.tolist()) <= {100, 200}


def test_log_probabilities_of_listed_tokens_are_exactly_theirs():
    logits = np.stack([random_logits(i) for i in range(64)])
    listed = tuple(range(290, VOCAB)) + tuple(range(0, 200, 20))
    params = [SamplingParams(logprob_token_ids=listed[: i % 20 + 1]) if i % 2 else SamplingParams(logprobs=20) for i in range(64)]
    result = Sampled(np.asarray(sampled(logits, params).packed))
    own = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    for row, of_row in enumerate(params):
        read = read_logprob(result, row, of_row)
        assert read.logprob == pytest.approx(own[row, read.token_id], abs=1e-5)
        expected = of_row.logprob_token_ids or np.argsort(-logits[row], kind="stable")[:20]
        assert [token for token, _ in read.top] == list(expected)
        np.testing.assert_allclose([logprob for _, logprob in read.top], own[row, list(expected)], atol=1e-5)


def test_log_probabilities_are_the_models_own():
    logits = np.stack([random_logits(i) for i in range(64)])
    params = [
        SamplingParams(temperature=2.0, top_k=5, frequency_penalty=2.0, logit_bias={int(of_row.argmax()): -90.0}, logprobs=3)
        for of_row in logits
    ]
    result = sampled(logits, params)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    rows = np.arange(64)
    np.testing.assert_allclose(result.logprobs, expected[rows, np.asarray(result.tokens)], atol=1e-5)
    np.testing.assert_array_equal(result.top_tokens, np.argsort(-logits, axis=1, kind="stable")[:, :20])
    np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(expected, np.asarray(result.top_tokens), 1), atol=1e-5)


def test_log_probabilities_that_nobody_wants_are_not_worked_out():
    result = sampled(random_logits(0)[None], [SamplingParams()])
    assert not np.any(result.logprobs) and not np.any(result.top_logprobs)


def test_a_vocabulary_smaller_than_the_alternatives_is_fine():
    logits = np.array([[0.0, 3.0, 1.0]], np.float32)
    rows = neutral_rows(1)
    set_row(rows, 0, SamplingParams(temperature=0.0, logprobs=20), 1, [])
    counts = TokenCounts(jnp.zeros((1, 3), bool), jnp.zeros((1, 3), jnp.int32))
    result = run(logits, rows, np.zeros(1, np.int32), counts, np.zeros(1, np.int32))
    assert result.top_tokens.tolist() == [[1, 2, 0]]


@jax.jit
def picked(weights, uniform):
    def on_shard(shard: VocabShard, weights, uniform):
        return pick(weights, uniform, shard)

    return shard_over_vocab(on_shard, split(weights), 1, split(weights), uniform)


def test_pick_finds_a_place_with_weight_at_every_edge():
    random = np.random.default_rng(4)
    size = 2000
    weights = (random.random((size, VOCAB)) * (random.random((size, VOCAB)) < 0.3)).astype(np.float32)
    weights[:, 0] = 0.0
    weights[0] = 0.0
    weights[0, 131] = 1.0  # one token alone
    up_to = np.cumsum(weights.astype(np.float64), axis=1) / weights.sum(1, dtype=np.float64, keepdims=True)
    rows = np.arange(size)
    below_one = np.nextafter(np.float32(1), np.float32(0))
    for uniform in (
        np.zeros(size, np.float32),
        np.full(size, below_one),
        *(up_to[rows, random.integers(0, VOCAB, size)].astype(np.float32) for _ in range(5)),
    ):
        for nudge in (-1.0, 0.0, 2.0):
            near = np.clip(np.nextafter(uniform, np.float32(nudge)) if nudge else uniform, 0.0, below_one)
            places = np.asarray(picked(weights, near))
            assert (weights[rows, places] > 0).all()
            assert (up_to[rows, places] >= near - 1e-5).all()
            assert (up_to[rows, places] - weights[rows, places] / weights.sum(1) <= near + 1e-5).all()


def test_scores_that_are_no_numbers_give_a_token_of_the_vocabulary():
    for spoiled in (np.full(VOCAB, np.nan), np.where(np.arange(VOCAB) == 7, np.nan, 0.0), np.full(VOCAB, np.inf), np.full(VOCAB, -np.inf)):
        logits = np.tile(spoiled.astype(np.float32), (4, 1))
        params = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5, min_p=0.1), SamplingParams(temperature=0.0)]
        tokens = np.asarray(sampled(logits, params).tokens)
        assert ((tokens >= 0) & (tokens < VOCAB)).all(), (spoiled, tokens)


def test_parts_draw_what_the_whole_draws(num_parts):
    """Wherever rounding of sums does not decide."""
    logits = np.stack([random_logits(i) for i in range(2048)])
    kinds = [
        {},
        {"top_k": 20},
        {"top_p": 0.8},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
        {"frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    ]
    params = [SamplingParams(**kinds[i % len(kinds)]) for i in range(len(logits))]
    outputs = [[(7 * i) % VOCAB, (31 * i) % VOCAB] for i in range(len(logits))]
    tokens = np.asarray(sampled(logits, params, outputs=outputs).tokens)
    with jax.set_mesh(make_mesh((0,))):
        rows, counts = rows_of(params, list(range(len(params)))), counts_of([[]] * len(params), outputs)
        on_one = jax.jit(sample_from_logits)(
            logits, rows, np.full(len(params), 2, np.int32), counts, np.arange(len(params)), np.zeros(len(params), np.int32)
        )
        expected = np.asarray(on_one.packed)[:, 0]
    assert np.mean(tokens != expected) <= (0 if num_parts == 1 else 1e-3)


def test_tokens_are_counted_where_they_are():
    random = np.random.default_rng(3)
    tokens = random.integers(0, VOCAB, 40).tolist()

    @jax.jit
    def counted(counts, arguments, slots, more):
        return add_sampled(reset(split(counts), *arguments), slots, more)

    stale = counts_of([[5, 150, 299]] * 3, [[0, 150, 150]] * 3)
    after = counted(stale, reset_arguments(1, tokens, 25, 64), np.array([1, 2, 1]), np.array([tokens[0], 299, VOCAB - 1]))
    expected = counts_of([[5, 150, 299], tokens[:25], [5, 150, 299]], [[0, 150, 150], [*tokens[25:], tokens[0], 299], [0, 150, 150, 299]])
    jax.tree.map(np.testing.assert_array_equal, after, expected)


def test_numbers_at_the_ends_of_their_ranges_leave_float32s_to_sample_from():
    """Some are none of its normal numbers, or 0 in it."""
    logits = random_logits(5)
    best = int(logits.argmax())
    params, expected = [], []
    for value in (1e-6, 1e-30, 1e-37, 1e-39, 1e-46, 5e-324):
        params += [
            SamplingParams(temperature=value),
            SamplingParams(top_p=value),
            SamplingParams(temperature=value, top_p=value, min_p=value),
        ]
        expected += [best] * 3
    for penalty in (1e-30, 1e-6, 100.0):
        params.append(SamplingParams(repetition_penalty=penalty, temperature=1e-30))
        scores = np.where(np.arange(VOCAB) == best, logits / np.float32(penalty), logits)
        expected.append(int(scores.argmax()))
    prompts = [[best] if p.repetition_penalty != 1.0 else [] for p in params]
    found = sampled(np.tile(logits, (len(params), 1)), params, prompts=prompts)
    assert np.asarray(found.tokens).tolist() == expected
