"""Writing to a page pool: each token at its place, nothing else touched, and nothing in it that is not a finite number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxinfer.kv_cache.pages import PagePool, own_length, own_places, token_axis
from jaxinfer.kv_cache.spec import NULL_PAGE, PageSpec
from pallas_kernels.page_write import write
from sharding.mesh import TENSOR, make_mesh
from sharding.rules import TENSOR_PARALLEL, rules_for

SHAPE = (3, 2, 6, 2, 4, 8)  # layers, keys and values, pages, KV heads, tokens a page, head size
run = jax.jit(write)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_each_token_is_at_its_place_of_its_layer_and_all_else_is_as_it_was(num_tokens):
    random = np.random.default_rng(num_tokens)
    before = random.standard_normal(SHAPE, np.float32)
    k, v = random.standard_normal((2, num_tokens, 2, 8), np.float32)
    places = random.permutation([(page, offset) for page in range(6) for offset in range(4)])[:num_tokens].astype(np.int32)
    expected = before.copy()
    for token, (page, offset) in enumerate(places):
        expected[1, 0, page, :, offset], expected[1, 1, page, :, offset] = k[token], v[token]
    found = run(jnp.asarray(before), jnp.int32(1), (k, v), places[:, 0], places[:, 1])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_what_is_no_finite_number_in_the_pools_type_is_stored_as_zero(bad, dtype):
    k = np.ones((2, 2, 8), np.float32)
    k[0, 1, 3] = bad  # float32's largest number is infinite in bfloat16
    found = run(jnp.zeros(SHAPE, dtype), jnp.int32(0), (k, -k), np.array([2, 4], np.int32), np.array([0, 3], np.int32))
    assert np.isfinite(np.asarray(found, np.float32)).all()
    fits = bool(jnp.isfinite(jnp.asarray(bad, dtype)))
    np.testing.assert_array_equal(np.asarray(found, np.float32)[0, :, 2, 1, 0, 3], [bad, -bad] if fits else [0, 0])
    np.testing.assert_array_equal(np.asarray(found, np.float32)[0, :, 4, :, 3], [np.ones((2, 8)), -np.ones((2, 8))])


def latents(num_devices, page_size=32, **options):
    spec = PageSpec(2, 1, 8, page_size, 4, num_sides=1)
    return PagePool(spec, 6, jnp.dtype("float32"), make_mesh(range(num_devices)), options.get("rules", TENSOR_PARALLEL))


@pytest.mark.parametrize(("num_devices", "page_size", "num_parts"), [(1, 32, 1), (2, 32, 2), (4, 32, 4), (8, 32, 1), (8, 64, 8), (2, 9, 1)])
def test_devices_share_out_latents_where_each_gets_enough(num_devices, page_size, num_parts):
    for rules in (TENSOR_PARALLEL, rules_for("decode", num_devices)):
        pool = latents(num_devices, page_size, rules=rules)
        assert pool.device_bytes == 2 * 6 * page_size * 8 * 4 // num_parts
        found = []
        with jax.set_mesh(pool.mesh):
            jax.jit(lambda pages, found=found: found.append(token_axis(pages))).lower(pool.abstract)
        assert found == [TENSOR if num_parts > 1 else None]
        moved = pool.abstract_moved(3)
        assert moved.sharding.shard_shape(moved.shape) == (3, 2, 1, 1, page_size // num_parts, 8)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_each_token_is_written_by_the_device_whose_part_it_is_in(num_devices):
    pool, random = latents(num_devices), np.random.default_rng(num_devices)
    before = random.standard_normal(pool.abstract.shape, np.float32)
    places = random.permutation([(page, offset) for page in range(1, 6) for offset in range(32)])[:50].astype(np.int32)
    values = random.standard_normal((50, 1, 8)).astype(np.float32)

    def local(pages, values, page_ids, offsets):
        return write(pages, jnp.int32(1), (values,), *own_places(page_ids, offsets, pages.shape[4], TENSOR))

    tokens, whole = PartitionSpec(None, None, None, None, TENSOR), PartitionSpec()
    run = jax.shard_map(local, mesh=pool.mesh, in_specs=(tokens, whole, whole, whole), out_specs=tokens, check_vma=False)
    found = np.array(jax.jit(run)(jax.device_put(before, pool.abstract.sharding), values, places[:, 0], places[:, 1]))
    expected = before.copy()
    expected[1, 0, places[:, 0], 0, places[:, 1]] = values[:, 0]
    found[:, :, NULL_PAGE] = expected[:, :, NULL_PAGE] = 0
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("num_devices", [2, 8])
def test_a_device_has_the_first_tokens_of_its_part_of_every_page(num_devices):
    part_size = 3
    run = jax.shard_map(
        lambda lengths: own_length(lengths, part_size, TENSOR)[None],
        mesh=make_mesh(range(num_devices)),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(TENSOR),
    )
    lengths = np.arange(4 * num_devices * part_size)
    expected = [[sum(t // part_size % num_devices == device for t in range(n)) for n in lengths] for device in range(num_devices)]
    np.testing.assert_array_equal(jax.jit(run)(lengths), expected)
