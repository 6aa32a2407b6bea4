"""Multi-head latent attention: written out in NumPy; expanded and absorbed; over pages, in chunks and step by step; split over devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.architecture.model_config import AnyRopeScaling, LatentSizes, YarnScaling
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import NULL_PAGE, LayerGroups, PageSpec
from jaxinfer.layers.attention_kernels import DecodeKernels, PrefillKernels
from jaxinfer.layers.latent_attention import LatentAttention, absorbed, attend_over_token_shards, expanded
from jaxinfer.layers.paged_attention import PagedAttentionBackend
from jaxinfer.layers.rope import CosSin, angles, inverse_frequencies
from jaxinfer.weights.formats.int8 import Int8
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from pallas_kernels.latent_prefill_attention.op import latent_prefill_attention
from pallas_kernels.paged_attention.op import paged_attention
from pallas_kernels.span import FULL_ATTENTION
from sharding.mesh import TENSOR, make_mesh
from sharding.partition import partition_spec
from sharding.rules import TENSOR_PARALLEL

SIZE, NUM_HEADS = 48, 4
SIZES = LatentSizes(query_rank=20, rank=24, nope_size=12, rope_size=8, value_size=10)
DIRECT = LatentSizes(query_rank=None, rank=24, nope_size=12, rope_size=8, value_size=10)
FLOAT32 = ModelWeightFormat(Plain(jnp.dtype("float32")))


def layer(sizes: LatentSizes, weight_format: ModelWeightFormat = FLOAT32, *, seed: int = 0, **options: Any) -> LatentAttention:
    """With random weights: norms and biases too."""
    made = LatentAttention(SIZE, NUM_HEADS, sizes, weight_format, **options)
    graph, state = nnx.split(made)
    random = np.random.default_rng(seed)
    values = [random.standard_normal(w.shape, np.float32) / (1 if w.ndim == 1 else 5) for w in jax.tree.leaves(state)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(v, weight_format.vector_dtype) for v in values]))


def turned_by(positions: Any, scaling: AnyRopeScaling = None) -> CosSin:
    return angles(jnp.asarray(positions), inverse_frequencies(SIZES.rope_size, 1e4, scaling))


def tokens(count: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, SIZE)), jnp.float32)


def dense(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
    """Every query over all tokens up to its own."""
    scores = jnp.where(jnp.tri(len(q), dtype=bool), jnp.einsum("tnh,snh->nts", q, k) * scale, -jnp.inf)
    return jnp.einsum("nts,snv->tnv", jax.nn.softmax(scores, axis=-1), v)


class Expanded:
    """Attends to nothing but the tokens it is given."""

    def latents(self, q: jax.Array, latents: jax.Array, up: jax.Array, pages: Any, scale: float) -> tuple[jax.Array, Any]:
        return dense(q, *expanded(latents, up, q.shape[2]), scale), pages


@pytest.mark.parametrize("sizes", [SIZES, DIRECT], ids=["queries-from-a-latent", "queries-from-the-hidden-state"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_the_layer_written_out(sizes: LatentSizes, use_bias: bool) -> None:
    """One token and one head at a time, in float64, pairs as complex numbers."""
    scaling = YarnScaling(40.0, 64, mscale=1.0, mscale_all_dim=1.0)
    made, x = layer(sizes, use_bias=use_bias, scaling=scaling), tokens(6)
    found, _ = made(x, turned_by(range(6), scaling), None, Expanded())

    def norm(v: np.ndarray, scale: Any) -> np.ndarray:
        return v / np.sqrt(np.mean(v * v) + 1e-6) * np.asarray(scale[...], np.float64)

    def turn(v: np.ndarray, position: int) -> np.ndarray:
        turned = (v[0::2] + 1j * v[1::2]) * np.exp(1j * position * inverse_frequencies(8, 1e4, scaling).astype(np.float64))
        return np.stack([turned.real, turned.imag], axis=1).reshape(-1)

    def of(parameter: Any) -> np.ndarray:
        return np.asarray(parameter[...], np.float64)

    start, hidden = sizes.query_rank or 0, np.asarray(x, np.float64)
    up, out_matrix = of(made.up), of(made.out.kernel)
    q_matrix, down_product = of((made.query_up or made.queries).kernel), made.down or made.kv_down
    expected = np.zeros((6, SIZE))
    keys: list[list[np.ndarray]] = [[] for _ in range(NUM_HEADS)]
    values: list[list[np.ndarray]] = [[] for _ in range(NUM_HEADS)]
    scale = (12 + 8) ** -0.5 * (0.1 * np.log(40) + 1) ** 2
    for t in range(6):
        down = hidden[t] @ of(down_product.kernel) + (of(down_product.bias) if use_bias else 0)
        latent, shared = norm(down[start : start + 24], made.norm.scale), turn(down[start + 24 :], t)
        origin = norm(down[:start], made.query_norm.scale) if made.query_norm is not None else hidden[t]
        for head in range(NUM_HEADS):
            q = origin @ q_matrix[:, head]
            q = np.concatenate([q[:12], turn(q[12:], t)])
            keys[head].append(np.concatenate([up[head, :12] @ latent, shared]))
            values[head].append(up[head, 12:] @ latent)
            weights = np.exp(np.array(keys[head]) @ q * scale)
            expected[t] += (weights / weights.sum() @ np.array(values[head])) @ out_matrix[head]
    expected += of(made.out.bias) if use_bias else 0
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_absorbed_is_expanded(dtype: str) -> None:
    """To rounding, in the type that weights have."""
    random = np.random.default_rng(3)
    q, latents, up = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((7, 4, 20), (7, 32), (24, 4, 22)))
    up = (up / 5).astype(dtype)

    def over_latents(queries: jax.Array) -> jax.Array:
        assert queries.shape == (7, 4, 32)
        shared = jnp.broadcast_to(latents[:, None], (7, 4, 32))
        return dense(queries, shared, shared[..., :24], 0.2)

    found, expected = absorbed(q, up, 32, over_latents), dense(q, *expanded(latents, up, 20), 0.2)
    assert (found.shape, found.dtype) == ((7, 4, 10), jnp.float32)
    np.testing.assert_allclose(found, expected, atol=2e-5 if dtype == "float32" else 4e-2)
    assert np.abs(expected).max() > 1


PAGE_SIZE = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunks:
    """As the prefill program attends: latents written to their pages, then expanded from there."""

    page_table: jax.Array
    rows: tuple[jax.Array, jax.Array, jax.Array]  # query_start, query_len, kv_len
    places: tuple[jax.Array, jax.Array]  # of each token: page and offset

    def latents(self, q: jax.Array, latents: jax.Array, up: jax.Array, pages: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
        pages = pages.at[1, 0, self.places[0], 0, self.places[1]].set(latents)
        out = latent_prefill_attention(q, pages, jnp.int32(1), self.page_table, *self.rows, up, scale=scale, query_tile=8)
        return out, pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steps:
    """As the decode program does: one token a row, over latents that are never expanded."""

    page_table: jax.Array
    kv_len: jax.Array

    def latents(self, q: jax.Array, latents: jax.Array, up: jax.Array, pages: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
        page, offset = (self.kv_len - 1) // PAGE_SIZE, (self.kv_len - 1) % PAGE_SIZE
        ids = jnp.take_along_axis(self.page_table, page[:, None], axis=1)[:, 0]
        pages = pages.at[1, 0, ids, 0, offset].set(latents)
        attend = partial(
            paged_attention,
            kv_pages=pages,
            layer=jnp.int32(1),
            page_table=self.page_table,
            kv_len=self.kv_len,
            scale=scale,
            value_size=len(up),
        )
        return absorbed(q, up, latents.shape[1], attend), pages


def test_chunks_and_then_steps_over_pages_are_the_whole_at_once() -> None:
    """Two requests of unequal lengths, in chunks that end within pages, packed; then six steps of both."""
    made, lengths, num_steps = layer(SIZES), (21, 9), 6
    attended = jax.jit(made.__call__)
    texts = [tokens(length + num_steps, seed) for seed, length in enumerate(lengths)]
    table = jnp.asarray(np.random.default_rng(0).permutation(np.arange(1, 21))[:16].reshape(2, 8))
    pages = jnp.full((3, 1, 21, 1, PAGE_SIZE, SIZES.latent_size), jnp.nan)
    found: list[list[jax.Array]] = [[], []]
    for chunks in (((0, 10), (0, 3)), ((10, 18), (3, 9)), ((18, 21), (9, 9))):
        x, positions, ids = jnp.full((32, SIZE), jnp.nan), np.zeros(32, np.int32), np.zeros(32, np.int32)
        for row, (begin, end) in enumerate(chunks):
            here = slice(16 * row, 16 * row + end - begin)
            x, positions[here] = x.at[here].set(texts[row][begin:end]), np.arange(begin, end)
            ids[here] = table[row, positions[here] // PAGE_SIZE]
        rows = (jnp.array([0, 16]), jnp.array([end - begin for begin, end in chunks]), jnp.array([end for _, end in chunks]))
        attend = Chunks(table, rows, (jnp.asarray(ids), jnp.asarray(positions % PAGE_SIZE)))
        out, pages = attended(x, turned_by(positions), pages, attend)
        for row, (begin, end) in enumerate(chunks):
            found[row].append(out[16 * row : 16 * row + end - begin])
    for step in range(num_steps):
        kv_len = jnp.array(lengths) + step + 1
        x = jnp.stack([text[length + step] for text, length in zip(texts, lengths, strict=True)])
        out, pages = attended(x, turned_by(kv_len - 1), pages, Steps(table, kv_len))
        for row in range(2):
            found[row].append(out[row : row + 1])
    for row, text in enumerate(texts):
        whole, _ = made(text, turned_by(range(len(text))), None, Expanded())
        np.testing.assert_allclose(jnp.concatenate(found[row]), whole, atol=5e-5)
        assert np.abs(whole).max() > 1


def test_heads_split_over_devices_give_the_same() -> None:
    made, x, mesh = layer(SIZES), tokens(9), make_mesh((0, 1))
    expected, _ = made(x, turned_by(range(9)), None, Expanded())

    class OverHeads:
        def latents(self, q: jax.Array, latents: jax.Array, up: jax.Array, pages: Any, scale: float) -> tuple[jax.Array, Any]:
            def local(q: jax.Array, latents: jax.Array, up: jax.Array) -> jax.Array:
                assert q.shape[1] == up.shape[1] == NUM_HEADS // 2
                return dense(q, *expanded(latents, up, q.shape[2]), scale)

            heads = PartitionSpec(None, TENSOR)
            return jax.shard_map(local, mesh=mesh, in_specs=(heads, PartitionSpec(), heads), out_specs=heads)(q, latents, up), pages

    graph, state = nnx.split(made)

    def is_parameter(leaf: Any) -> bool:
        return isinstance(leaf, nnx.Variable)

    shardings = jax.tree.map(
        lambda w: NamedSharding(mesh, partition_spec(w.get_metadata("logical_axes"), TENSOR_PARALLEL)), state, is_leaf=is_parameter
    )
    placed = [
        jax.device_put(w[...], s) for w, s in zip(jax.tree.leaves(state, is_leaf=is_parameter), jax.tree.leaves(shardings), strict=True)
    ]
    split = {w.sharding.spec for w in placed}
    assert len(split) > 1

    def run(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        model = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), weights))
        return model(x, turned_by(range(9)), None, OverHeads())[0]

    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(run)(placed, x), expected, atol=2e-5)


def test_what_expands_stays_floats_beside_integers() -> None:
    made = LatentAttention(SIZE, NUM_HEADS, SIZES, ModelWeightFormat(Int8()))
    assert (made.up.get_value().dtype, made.down.kernel.dtype) == (jnp.float32, jnp.int8)


HEADS, WHOLE, TOKENS = PartitionSpec(None, TENSOR), PartitionSpec(), PartitionSpec(TENSOR)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_devices", [2, 8])
def test_parts_of_a_context_count_by_their_sums(num_devices: int, dtype: str) -> None:
    """Scores of -200 to 200, so that parts count for all or for nothing; a device has no token of some rows."""
    random, mesh = np.random.default_rng(num_devices), make_mesh(range(num_devices))
    q, latents = random.standard_normal((5, 16, 32)) * 8, random.standard_normal((num_devices * 4, 32))
    q, latents = (jnp.asarray(a, dtype) for a in (q, latents))
    seen = random.random((5, len(latents))) < 0.4
    seen[:, 0], seen[2, : len(latents) // 2], seen[4] = True, False, False
    seen[2, -1] = True

    def attend(q: jax.Array, latents: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.einsum("tnc,sc->tns", q.astype(jnp.float32), latents.astype(jnp.float32), precision="highest")
        scores = jnp.where(seen[:, None], scores, -1e30)
        out = jnp.einsum("tns,sr->tnr", jnp.where(seen[:, None], jax.nn.softmax(scores, -1), 0), latents[:, :24].astype(jnp.float32))
        return out.astype(q.dtype), jax.nn.logsumexp(scores, -1)

    def local(q: jax.Array, latents: jax.Array, seen: jax.Array) -> jax.Array:
        return attend_over_token_shards(q, lambda every: attend(every, latents, seen), TENSOR)

    specs = HEADS, TOKENS, HEADS
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((q, latents, seen), specs, strict=True)]
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=HEADS, check_vma=False))(*placed)
    assert found.dtype == q.dtype
    expected, _ = attend(q.astype(jnp.float32), latents.astype(jnp.float32), jnp.asarray(seen))
    assert not np.any(expected[4]) and np.abs(expected).max() > 1
    rounding = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-9}[dtype]
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=4 * rounding, rtol=rounding)


def over_pages(num_devices: int, role: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """A step of a role over 64 tokens a page: what is attended to, and the pages then. What no context reaches is as large as numbers get."""
    random, mesh = np.random.default_rng(7), make_mesh(range(num_devices))
    pool = PagePool(PageSpec(2, 1, SIZES.latent_size, 64, 4, num_sides=1), 30, jnp.dtype("float32"), mesh, TENSOR_PARALLEL)
    table = jnp.asarray(random.permutation(np.arange(1, 29)).reshape(4, 7).astype(np.int32))
    lengths = np.array([1, 64, 65, 400])  # of contexts, these tokens included; a row more has none
    new = np.ones(4, int) if role == "decode" else np.array([1, 30, 9, 70])
    contents = np.full(pool.abstract.shape, 1e30, np.float32)
    for row, length in enumerate(lengths - new):
        for position in range(length):
            contents[:, 0, table[row, position // 64], 0, position % 64] = random.standard_normal((2, SIZES.latent_size))
    starts = np.cumsum([0, *(-new // 32 * -32)]) if role == "prefill" else np.arange(5)
    num_tokens = starts[-1] + (1 if role == "decode" else 32)
    ids, positions = np.full(num_tokens, NULL_PAGE, np.int32), np.zeros(num_tokens, np.int32)
    for row in range(4):
        here = slice(starts[row], starts[row] + new[row])
        positions[here] = np.arange(lengths[row] - new[row], lengths[row])
        ids[here] = table[row, positions[here] // 64]
    kv_len = jnp.asarray([*lengths, 0], jnp.int32)
    rows: Any = kv_len if role == "decode" else (jnp.asarray(starts, jnp.int32), jnp.asarray([*new, 0], jnp.int32), kv_len)
    tables = jnp.concatenate([table, jnp.zeros((1, 7), jnp.int32)])
    kernels = DecodeKernels("xla") if role == "decode" else PrefillKernels("xla", query_tile=32)
    inputs = random.standard_normal((num_tokens, 8, 20)), random.standard_normal((num_tokens, 32)), random.standard_normal((24, 8, 22)) / 5
    placed = [
        jax.device_put(jnp.asarray(a, jnp.float32), NamedSharding(mesh, s)) for a, s in zip(inputs, (HEADS, WHOLE, HEADS), strict=True)
    ]

    def step(q: jax.Array, latents: jax.Array, up: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        groups = LayerGroups.of((FULL_ATTENTION,) * 2)
        attend = PagedAttentionBackend(mesh, kernels, groups, (tables,), (jnp.asarray(ids),), jnp.asarray(positions % 64), rows)
        return attend.at(attend.location(1)).latents(q, latents, up, pages, 0.2)

    with jax.set_mesh(mesh):
        out, pages = jax.jit(step)(*placed, jax.device_put(contents, pool.abstract.sharding))
    is_split = pages.sharding.shard_shape(pages.shape)[4] == 64 // num_devices
    after = np.array(pages)
    assert not np.array_equal(after[1], contents[1])
    after[:, :, NULL_PAGE] = 0
    return np.asarray(out), after, is_split


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_devices_that_share_a_context_out_attend_to_all_of_it(num_devices: int, role: str) -> None:
    (found, pages, is_split), (expected, expected_pages, _) = over_pages(num_devices, role), over_pages(1, role)
    assert is_split
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_array_equal(pages, expected_pages)
    assert np.abs(expected).max() > 1
