"""Packed products against plain ones."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.llvm import host
from pallas_kernels.packed_matmul import layout, llvm_cpu, op
from pallas_kernels.packed_matmul.cases import CASES, PackedMatmulCase
from pallas_kernels.packed_matmul.op import packed_matmul, unsupported_reason

# One program each, as loading has it.
pack = partial(jax.jit, static_argnums=(1, 2))(layout.pack)
unpack = partial(jax.jit, static_argnums=1)(layout.unpack)
KINDS = ("float32", "bfloat16", "int8")


def arguments(case: PackedMatmulCase, kind: str, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """x, and the matrices as they are before they are packed."""
    random = np.random.default_rng(seed)
    shapes = (case.num_rows, case.num_inputs), (case.num_matrices, case.num_outputs, case.num_inputs)
    if kind == "int8":
        x, matrices = (random.integers(-128, 128, shape) for shape in shapes)
    else:
        x, matrices = (random.standard_normal(shape, np.float32) for shape in shapes)
    return jnp.asarray(x, kind), jnp.asarray(matrices, kind)


def packed_as(kind: str, matrices: jax.Array) -> jax.Array:
    return jax.vmap(lambda matrix: pack(matrix, jnp.dtype(kind)))(matrices)


def exact(x: jax.Array, matrix: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T


def needs(kind: str) -> None:
    if reason := unsupported_reason(jnp.dtype(kind)):
        pytest.skip(reason)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", ["llvm_cpu", "reference"])
def test_each_matrix_of_a_stack_as_numpy_multiplies_it(case, kind, backend):
    needs(kind)
    x, matrices = arguments(case, kind)
    multiply = jax.jit(lambda x, packed, place: packed_matmul(x, packed, place, backend=backend))
    packed = packed_as(kind, matrices)
    for place in range(case.num_matrices):
        found = multiply(x, packed, jnp.int32(place))
        wanted = exact(x, matrices[place])
        assert found.dtype == (jnp.int32 if kind == "int8" else jnp.float32)
        if kind == "int8":
            np.testing.assert_array_equal(found, wanted)
        else:
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * case.num_inputs**0.5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows(kind):
    """Every way in which rows are cut into tiles, and rows into chunks."""
    needs(kind)
    x, matrices = arguments(PackedMatmulCase("", 300, 64, 80), kind, 1)
    packed = pack(matrices[0], matrices.dtype)[None]
    wanted = exact(x, matrices[0])
    for num_rows in (*range(1, 20), 127, 128, 129, 135, 256, 300):
        found = packed_matmul(x[:num_rows], packed, jnp.int32(0))
        np.testing.assert_allclose(found, wanted[:num_rows], rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_rows_do_not_touch_each_other(kind):
    """Rows of one step belong to several requests."""
    x, matrices = arguments(PackedMatmulCase("", 19, 64, 80), kind, 2)
    packed = pack(matrices[0], matrices.dtype)[None]
    sound = np.asarray(packed_matmul(x, packed, jnp.int32(0)))
    broken = np.asarray(packed_matmul(x.at[3].set(jnp.nan), packed, jnp.int32(0)))
    assert np.isnan(broken[3]).all()
    np.testing.assert_array_equal(np.delete(broken, 3, 0), np.delete(sound, 3, 0))


def test_a_row_is_the_same_in_any_batch():
    for kind in ("float32", "bfloat16"):
        x, matrices = arguments(PackedMatmulCase("", 45, 192, 208), kind, 3)
        packed = pack(matrices[0], matrices.dtype)[None]
        together = np.asarray(packed_matmul(x, packed, jnp.int32(0)))
        for row in (0, 7, 44):
            np.testing.assert_array_equal(packed_matmul(x[row : row + 1], packed, jnp.int32(0))[0], together[row])


@pytest.mark.parametrize("kind", KINDS)
def test_pack_and_unpack_over_several_axes(kind):
    _, matrices = arguments(PackedMatmulCase("", 1, 24, 96), kind)
    matrix = matrices[0].reshape(3, 32, 2, 12)
    packed = pack(matrix, matrix.dtype, 2)
    assert packed.shape == (3, 2, 2, *{"float32": (12, 16, 1), "bfloat16": (6, 16, 2), "int8": (3, 16, 4)}[kind])
    np.testing.assert_array_equal(unpack(packed, 2), matrix)
    np.testing.assert_array_equal(packed.reshape(6, -1, *packed.shape[-2:]), pack(matrix.reshape(96, 24), matrix.dtype))


def test_many_products_at_once():
    """Programs of several meshes share one pool of threads: calls that wait for helpers must not wait for each other."""
    x, matrices = arguments(PackedMatmulCase("", 64, 256, 256), "float32", 4)
    packed, wanted = pack(matrices[0], matrices.dtype)[None], exact(x, matrices[0])
    multiply = jax.jit(lambda x: packed_matmul(x, packed, jnp.int32(0)))
    rows = [jax.device_put(x, device) for device in jax.devices("cpu")[:4]]
    for found in [multiply(rows[i % len(rows)]) for i in range(200)]:
        np.testing.assert_allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"x": jnp.zeros((2, 8), jnp.float16)},
        {"x": jnp.zeros((2, 8), jnp.bfloat16)},
        {"x": jnp.zeros((2, 9), jnp.float32)},
        {"x": jnp.zeros(8, jnp.float32)},
        {"matrices": jnp.zeros((2, 8, 16, 1), jnp.float32)},
        {"matrices": jnp.zeros((1, 2, 4, 16, 2), jnp.float32)},
        {"place": jnp.zeros(1, jnp.int32)},
        {"place": jnp.float32(0)},
    ],
    ids=lambda change: " ".join(f"{name} {a.dtype}{a.shape}" for name, a in change.items()),
)
def test_shapes_that_do_not_fit_are_refused(change):
    fitting = {"x": jnp.zeros((2, 8), jnp.float32), "matrices": jnp.zeros((1, 2, 8, 16, 1), jnp.float32), "place": jnp.int32(0)}
    packed_matmul(**fitting)
    with pytest.raises(ValueError, match="packed_matmul"):
        packed_matmul(**(fitting | change))


@pytest.mark.parametrize("shape", [(24, 8), (16, 3)])
def test_what_can_not_be_packed_is_refused(shape):
    with pytest.raises(ValueError, match="pack"):
        pack(jnp.zeros(shape), jnp.dtype("bfloat16"))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_code_for_processors_without_avx512(kind, monkeypatch):
    """What this machine's processor can run too: plain multiplications and additions, fewer sums at a time."""
    plain = replace(host.host_target(), avx512=False, avx512_bf16=False, avx512_vnni=False)
    for module in (llvm_cpu, op):
        monkeypatch.setattr(module, "host_target", lambda: plain)
    monkeypatch.setattr(llvm_cpu, "NAME", f"{llvm_cpu.NAME}_plain")
    for case in CASES[:4]:
        x, matrices = arguments(case, kind)
        wanted = exact(x, matrices[0])
        found = packed_matmul(x, packed_as(kind, matrices), jnp.int32(0))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * case.num_inputs**0.5 * np.abs(wanted).max())
    assert unsupported_reason(jnp.dtype("int8")) is not None
