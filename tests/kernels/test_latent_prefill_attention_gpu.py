"""latent_prefill_attention's kernel for GPUs, interpreted on a CPU: what it copies from where runs of context are expanded. What registers hold is for
tests/aot/test_running.py, which runs these tests with what is compiled."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.latent_prefill_attention.cases import LatentPrefillCase
from pallas_kernels.latent_prefill_attention.mosaic_gpu import latent_prefill_attention
from pallas_kernels.latent_prefill_attention.op import latent_prefill_attention as op
from pallas_kernels.latent_prefill_attention.op import unsupported_reason
from pallas_kernels.latent_prefill_attention.page_list import PageList
from pallas_kernels.mosaic.card import HOPPER
from pallas_kernels.ragged_prefill_attention.mosaic_tile_work import PrefillTiling
from sharding.mesh import TENSOR, make_mesh
from tests.kernels.compiled import compiled
from tests.kernels.poisoned_pool import LAYER
from tests.kernels.test_latent_prefill_attention import arguments, options

op = compiled(op)

# Two requests, of which the second has a prefix; the end of each is within a page.
TWO = LatentPrefillCase("two", 1, 32, 16, 16, 16, 16, 64, 32, ((0, 20), (70, 31)))


def attend(case, inputs, **given):
    q, latents, *others = inputs
    given = {"tiling": PrefillTiling(1, 64, 2), "interpreted": True, "pool_is_finite": False, **options(case), **given}
    run = functools.partial(latent_prefill_attention, **given)
    return np.asarray(jax.jit(run)(q, latents, jnp.int32(LAYER), *others), np.float32)


def check(case, inputs, found):
    """As the reference has it, up to the types' rounding of what is expanded, weighed and put together."""
    wide = [a.astype(jnp.float32) if a.dtype == inputs[0].dtype else a for a in inputs]
    expected = op(*wide[:2], LAYER, *wide[2:], **options(case), backend="reference")
    np.testing.assert_allclose(found, expected, atol=4 * float(jnp.finfo(inputs[0].dtype).eps) * float(jnp.abs(expected).max()))
    assert np.any(expected)


@pytest.mark.parametrize(
    ("case", "given"),
    [
        # Three runs: the first has all of one request and begins the other, the last begins before that one's queries end.
        (TWO, {"run_tokens": 48, "splits": 2}),
        (LatentPrefillCase("kimi", 1, 512, 128, 64, 128, 16, 32, 32, ((9, 20),)), {"tiling": PrefillTiling(1, 128, 2)}),
    ],
    ids=["runs-in-shares", "kimis-sizes"],
)
def test_it_is_attention_over_expanded_latents(case, given):
    inputs = arguments(case, 0, jnp.bfloat16, num_rows=len(case.rows))
    check(case, inputs, attend(case, inputs, **given))


@pytest.mark.parametrize(
    ("case", "given"),
    [
        (TWO, {}),
        (TWO, {"run_tokens": 32}),  # of two pages each, of which the first has one request whole
        (LatentPrefillCase("own", 1, 32, 16, 0, 16, 16, 32, 32, ((40, 20),)), {"run_tokens": 32}),  # of a key nothing is shared
    ],
    ids=["one-run", "runs", "nothing-shared"],
)
def test_however_context_is_cut_and_keys_are_shared(case, given):
    test_it_is_attention_over_expanded_latents(case, given)


def test_a_batch_with_an_unused_row_and_tokens_of_no_request():
    case = LatentPrefillCase("gap", 2, 32, 16, 16, 16, 16, 96, 32, ((0, 5), (3, 40)))
    q, latents, table, start, *others = arguments(case, 1, jnp.float16)
    inputs = [jnp.roll(q, 32, axis=0).at[:32].set(jnp.nan), latents, table, jnp.where(start < 32, 32, 64).at[2].set(0), *others]
    inputs[0] = inputs[0][:96]
    case_tokens = np.asarray(attend(case, inputs))
    assert not case_tokens[:32].any()
    check(case, inputs, case_tokens)


def test_devices_that_have_a_part_of_each_page_gather_what_one_would_read():
    """No more of it here: JAX's interpreter runs one device's kernel at a time, and waits for the other's."""
    _, latents, table, _, _, kv_len, _ = arguments(TWO, 2, num_rows=2)
    place, tokens = jnp.arange(2, 7), PartitionSpec(None, None, None, None, TENSOR)
    mesh, spec = make_mesh(range(2)), PartitionSpec()

    def read(latents, table, kv_len, *, axis):
        return PageList.for_rows(latents, jnp.int32(LAYER), table, kv_len, axis).read_whole(place)

    of_parts = functools.partial(read, axis=TENSOR)
    run = jax.shard_map(of_parts, mesh=mesh, in_specs=(tokens, spec, spec), out_specs=spec, check_vma=False)
    placed = [jax.device_put(a, NamedSharding(mesh, of)) for a, of in ((latents, tokens), (table, spec), (kv_len, spec))]
    expected = read(latents, table, kv_len, axis=None)
    assert expected.shape == (5 * 16, 48)
    np.testing.assert_array_equal(jax.jit(run)(*placed), expected)


def test_a_request_that_overflows_spoils_no_other():
    q, latents, table, *others = arguments(TWO, 3, jnp.bfloat16, num_rows=2)
    sound = attend(TWO, [q, latents, table, *others])
    spoilt = latents.at[LAYER, 0, table[0, 1]].set(3e38)  # whose keys and values are infinite
    found = attend(TWO, [q, spoilt, table, *others])
    assert not np.isfinite(found[18]).any()
    np.testing.assert_array_equal(found[32:], sound[32:])


def test_what_the_kernel_can_not_do_is_said():
    bfloat16 = jnp.dtype("bfloat16")

    def reason(dtype=bfloat16, key_sizes=(128, 64), value_size=128, page_size=16, query_tile=32, card=HOPPER):
        return unsupported_reason("mosaic_gpu", dtype, key_sizes, value_size, page_size, query_tile, card)

    assert reason() is None
    assert reason(key_sizes=(64, 32), value_size=64, page_size=128) is None
    for given, words in (
        ({"dtype": jnp.dtype("float32")}, "float32 pages"),
        ({"key_sizes": (128, 8)}, "keys of 128 and 8 columns: they must be multiples of 16"),
        ({"key_sizes": (192, 64), "value_size": 256}, "values of 256 columns: they must be as many as a key's own, 192"),
        ({"key_sizes": (512, 64), "value_size": 512}, "values of 512 columns"),
        ({"page_size": 12}, "pages of 12 tokens"),
        ({"query_tile": 4}, "tiles of 4 query tokens"),
    ):
        assert words in str(reason(**given))
    with pytest.raises(ValueError, match="scale 0 must be positive"):
        q, latents, *others = arguments(TWO, 0, jnp.bfloat16)
        latent_prefill_attention(q, latents, jnp.int32(LAYER), *others, scale=0, query_tile=32, pool_is_finite=True)
