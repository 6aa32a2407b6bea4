import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding.mesh import TENSOR, make_mesh
from sharding.partition import move, named_sharding, partition_spec, place, replicated, within
from sharding.rules import RULES, TENSOR_PARALLEL
from tests import model_on_mesh


def test_axes_that_the_rules_name_are_split():
    assert partition_spec(("embed", "heads", "head_size"), TENSOR_PARALLEL) == PartitionSpec(None, TENSOR, None)
    assert partition_spec(("mlp", "embed"), TENSOR_PARALLEL) == PartitionSpec(TENSOR, None)
    assert partition_spec((None, "kv_heads"), TENSOR_PARALLEL) == PartitionSpec(None, TENSOR)
    assert partition_spec(("vocab", "embed"), {}) == PartitionSpec(None, None)


def test_every_role_has_a_table():
    assert set(RULES) == {"prefill", "decode", "encode"}
    for rules in RULES.values():
        assert set(rules.values()) <= set(make_mesh((0,)).axis_names)


def test_shards_are_equal_parts():
    sharding = named_sharding(make_mesh((0, 1)), TENSOR_PARALLEL, ("embed", "heads"), (6, 4), "q")
    assert sharding.shard_shape((6, 4)) == (6, 2)
    assert replicated(make_mesh((0, 1))).shard_shape((6, 4)) == (6, 4)


def test_an_axis_that_does_not_divide_is_named():
    with pytest.raises(
        ValueError,
        match=r"blocks\.0\.k: its kv_heads axis of 3 can't be split over 2 devices; use a number of devices that divides 3, such as 1",
    ):
        named_sharding(make_mesh((0, 1)), TENSOR_PARALLEL, ("embed", "kv_heads"), (8, 3), "blocks.0.k")
    with pytest.raises(
        ValueError, match=r"embedding\.table: its vocab axis of 130 can't be split over 8 devices; .* divides 130, such as 5"
    ):
        named_sharding(make_mesh(range(8)), TENSOR_PARALLEL, ("vocab", "embed"), (130, 8), "embedding.table")
    named_sharding(make_mesh((0, 1)), TENSOR_PARALLEL, ("embed",), (3,), "not split, so of any size")


def test_every_axis_of_the_model_is_split_or_whole_on_purpose(tiny_model_path):
    model = model_on_mesh.put(tiny_model_path, (0, 1))
    leaves = zip(model.template.leaves, model.weights, strict=True)
    whole = {path for leaf, weight in leaves if weight.sharding.is_fully_replicated for path in leaf.paths}
    assert {path.rpartition(".")[0].rpartition(".")[2] or path for path in whole} == {"attention_norm", "mlp_norm", "norm"}
    assert all(isinstance(weight, jax.Array) for weight in model.weights)
    assert model.pool.abstract.sharding.shard_shape(model.pool.abstract.shape)[3] == 1, "one of two KV heads on each device"


def test_host_arrays_and_those_of_other_meshes_come_whole_and_so_sharded():
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    here, there = (named_sharding(make_mesh(ids), TENSOR_PARALLEL, ("mlp", "embed"), values.shape, "it") for ids in ((0, 1), (3, 2)))
    placed = place({"one": values}, here)["one"]
    moved = move(placed, there)
    assert (placed.sharding, moved.sharding) == (here, there)
    np.testing.assert_array_equal(moved, values)


def test_where_one_part_of_an_array_lies_in_another():
    whole, low, high = slice(None), slice(0, 2), slice(2, 4)
    assert within((whole, whole), (low, whole), (4, 6)) == (slice(0, 2), slice(0, 6))
    assert within((high, whole), (slice(3, 4), high), (4, 6)) == (slice(1, 2), slice(2, 4))
    assert within((low, whole), (low, whole), (4, 6)) == (slice(0, 2), slice(0, 6))
    assert within((low, whole), (slice(1, 3), whole), (4, 6)) is None
    assert within((high, whole), (low, whole), (4, 6)) is None
