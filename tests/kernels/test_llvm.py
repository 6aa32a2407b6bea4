"""What the kernels in LLVM IR stand on."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.llvm.custom_call import handler, load_data, load_dim
from pallas_kernels.llvm.exponential import exponential
from pallas_kernels.llvm.host import host_target, register

# y = e to x, 16 numbers a chunk.
KERNEL = f"""
{exponential()}
define internal i64 @plan(ptr %job, i64 %threads) {{
{load_dim("size", 0, 0)}
  %chunks = lshr i64 %size, 4
  ret i64 %chunks
}}
define internal void @chunk(ptr %job, i64 %c) {{
{load_data("x", 0)}
{load_data("y", 1)}
  %at = shl i64 %c, 4
  %x_c = getelementptr float, ptr %x, i64 %at
  %y_c = getelementptr float, ptr %y, i64 %at
  %value = load <16 x float>, ptr %x_c, align 4
  %power = call <16 x float> @exp16(<16 x float> %value)
  store <16 x float> %power, ptr %y_c, align 4
  ret void
}}"""


def powers(x: np.ndarray) -> np.ndarray:
    name = register("jaxinfer_test_exponential", lambda: handler(host_target(), 1, 1, KERNEL))
    return np.asarray(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, jnp.float32))(x))


def test_the_exponential_of_every_size():
    x = np.concatenate([np.linspace(-87, 88, 4096), np.linspace(-1, 1, 4096), [0.0] * 16]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(powers(x) - exact) / exact) < 2e-7


def test_what_is_too_small_is_nothing_and_nan_stays():
    x = np.array([-87.5, -1e3, -1e30, -np.inf, np.nan] + [0.0] * 11, np.float32)
    found = powers(x)
    np.testing.assert_array_equal(found, [0, 0, 0, 0, np.nan] + [1] * 11)


def test_a_call_without_work_returns():
    assert powers(np.zeros(0, np.float32)).shape == (0,)
