"""--weights int8: matrices as integers with a scale an output, everything else in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer import SamplingParams
from jaxinfer.weights.formats import int8
from jaxinfer.weights.formats.weight_format import StackedMatrix
from pallas_kernels.packed_matmul.layout import unpack
from sharding.mesh import TENSOR, make_mesh
from tests import tiny_model
from tests.engine.workload import workload

PROMPTS, _ = workload()
SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (64,), "prefill_chunk_size": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def multiplied(x, matrix, scale, *, device_ids=(0,), inputs=None, outputs=None):
    """`int8.product` on a mesh, its inputs or its first output axis split over the devices."""
    mesh = make_mesh(device_ids)
    rest = [None] * (matrix.ndim - 2)
    arrays = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
        for array, spec in ((x, (None, inputs)), (matrix, (outputs, *rest, inputs)), (scale, (outputs, *rest)))
    ]
    with jax.set_mesh(mesh):
        return jax.jit(int8.product)(*arrays)


def test_no_value_is_off_by_more_than_half_a_scale():
    random = np.random.default_rng(0)
    matrix = random.standard_normal((96, 256), np.float32) * np.geomspace(1e-6, 1e6, 96, dtype=np.float32)[:, None]
    matrix[3] = 0.0
    matrix[4, 7] = 1e9  # an outlier takes the accuracy of its own row and of no other
    values, scale = map(np.asarray, int8.quantize(jnp.asarray(matrix)))
    assert (values.dtype, scale.dtype) == (np.int8, np.float32)
    assert np.abs(values[np.arange(96) != 3]).max(axis=1).tolist() == [127] * 95
    assert np.all(np.abs(values * scale[:, None].astype(np.float64) - matrix) <= scale[:, None] * 0.5001)
    assert not values[3].any()


@pytest.mark.parametrize("num_rows", [1, 2, 5, 32, 33])
@pytest.mark.parametrize("shape", [(96,), (3, 2, 16)])
def test_a_product_loses_nothing_but_what_the_weights_have_lost(num_rows, shape):
    random = np.random.default_rng(0)
    x = random.standard_normal((num_rows, 256), np.float32)
    x[0] *= 100.0
    x[-1, 5] = 300.0  # as large as activations get
    matrix = random.integers(-127, 128, (*shape, 256)).astype(np.int8)
    scale = random.uniform(0.5, 2.0, shape).astype(np.float32)
    found = multiplied(x, matrix, scale)
    assert (found.dtype, found.shape) == (jnp.float32, (num_rows, *shape))
    exact = np.einsum("ti,...i->t...", x.astype(np.float64), matrix.astype(np.float64)) * scale
    # Rows of 16 bits: half a unit of each of the 256 products, a quarter of which is generous for the root of their number.
    unit = np.abs(x).max(axis=1) / 127 / 254
    assert np.all(np.abs(found - exact).max(axis=tuple(range(1, found.ndim))) <= unit * 64 * 127)


def test_a_row_is_the_same_in_any_batch():
    random = np.random.default_rng(1)
    x, matrix = random.standard_normal((32, 256), np.float32), random.integers(-127, 128, (96, 256)).astype(np.int8)
    scale = np.ones(96, np.float32)
    together = multiplied(x, matrix, scale)
    for row in (0, 17):
        np.testing.assert_array_equal(multiplied(x[row : row + 1], matrix, scale)[0], together[row])


@pytest.mark.parametrize("num_rows", [4, 40])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_row_that_is_no_number_spoils_no_other(num_rows, broken):
    """Rows of one step belong to several requests."""
    random = np.random.default_rng(3)
    x, matrix = random.standard_normal((num_rows, 256), np.float32), random.integers(-127, 128, (96, 256)).astype(np.int8)
    scale = np.ones(96, np.float32)
    sound = multiplied(x, matrix, scale)
    x[0] = broken
    np.testing.assert_array_equal(multiplied(x, matrix, scale)[1:], sound[1:])


@pytest.mark.parametrize(("split", "num_rows"), [("outputs", 3), ("outputs", 40), ("inputs", 30), ("inputs", 40)])
def test_two_devices_multiply_as_one_does(split, num_rows):
    random = np.random.default_rng(2)
    x, matrix = random.standard_normal((num_rows, 256), np.float32), random.integers(-127, 128, (4, 8, 256)).astype(np.int8)
    scale = random.uniform(0.5, 2.0, (4, 8)).astype(np.float32)
    one, two = multiplied(x, matrix, scale), multiplied(x, matrix, scale, device_ids=(0, 1), **{split: TENSOR})
    if num_rows <= 32 and split == "outputs":
        np.testing.assert_array_equal(one, two)
    elif num_rows <= 32:  # each rounds its inputs by their own largest, which loses no more
        exact = np.einsum("ti,abi->tab", x.astype(np.float64), matrix) * scale
        assert np.abs(two - exact).mean() < 1.05 * np.abs(one - exact).mean()
    else:
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-2)


@pytest.fixture(scope="module", params=["auto", pytest.param("xla", marks=pytest.mark.exhaustive)])
def integers(llms, request):
    return llms(weights="int8", matmul_backend=request.param, **SMALL)


def test_the_engines_matrices_are_the_checkpoints_rounded(integers):
    """Of each kind one, and one of those that several tensors are joined in."""
    theirs = tiny_model.tensors()
    components = integers.engine._components
    model = components.plan.template.merge(components.weights.decode[0])

    def of(param, output_axes):
        kernel = param.get_value()
        return (
            unpack(jnp.asarray(np.asarray(kernel.stack)[int(kernel.index)]), output_axes) if isinstance(kernel, StackedMatrix) else kernel
        )

    block, prefix = model.blocks[1], "model.layers.1."
    for values, scale, tensor in (
        (of(model.embedding.table, 1), model.embedding.table_scale, theirs["model.embed_tokens.weight"]),
        (of(block.mlp.down.kernel, 1), block.mlp.down.kernel_scale, theirs[prefix + "mlp.down_proj.weight"]),
        (of(block.attention.out.kernel, 1), block.attention.out.kernel_scale, theirs[prefix + "self_attn.o_proj.weight"]),
        (of(block.mlp.gate_up.kernel, 2)[1], block.mlp.gate_up.kernel_scale[1], theirs[prefix + "mlp.up_proj.weight"]),
    ):
        wide = np.asarray(values[...], np.float64).reshape(tensor.shape) * np.asarray(scale[...], np.float64)[:, None]
        np.testing.assert_allclose(wide, tensor, atol=np.abs(tensor).max() / 127 * 0.501)
    assert block.attention_norm.scale[...].dtype == jnp.float32


def test_weights_are_little_over_a_quarter_of_the_bytes(integers, llm):
    narrow, wide = integers.engine.stats.memory, llm.engine.stats.memory
    assert 0.25 < narrow["shared weights"] / wide["shared weights"] < 0.28
    assert narrow["shared KV pages"] == wide["shared KV pages"]


def test_what_sampling_reports_is_the_plain_pass_and_near_float32s(integers, llm):
    for output in integers.generate(PROMPTS[:6], GREEDY):
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        reported = [one.logprob for one in [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]]
        np.testing.assert_allclose(reported, integers.logprobs(tokens)[1:], atol=2e-3)
        off = np.abs(reported - llm.logprobs(tokens)[1:])
        assert off.max() < 0.5
        assert off.mean() < 0.1  # of scores as far apart as -1 and -21
    assert integers.engine.stats.num_compilations_after_ready == 0


@pytest.mark.parametrize(
    "layout", [{"prefill_devices": (0, 1), "decode_devices": (0, 1)}, {"prefill_devices": (0, 1), "decode_devices": (2,)}]
)
def test_tokens_are_the_same_alone_in_a_batch_and_on_two_devices(integers, llms, layout):
    alone = [integers.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS[:6]]
    assert [output.outputs[0].token_ids for output in integers.generate(PROMPTS[:6], GREEDY)] == alone
    spread = llms(weights="int8", matmul_backend=integers.engine._components.config.model.matmul_backend, **layout, **SMALL)
    assert [output.outputs[0].token_ids for output in spread.generate(PROMPTS[:6], GREEDY)] == alone


def test_made_up_weights_are_integers_too(llms):
    made_up = llms(weights="int8", random_weights=True, **SMALL)
    assert {leaf.dtype.name for leaf in made_up.engine._components.plan.template.leaves} in ({"int8", "float32"}, {"uint8", "float32"})
    assert len(made_up.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids) == 24
