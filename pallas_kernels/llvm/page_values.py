"""LLVM IR that reads values of a page pool: float32, or codes of float8_e4m3fn."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.float8_pages import CODE_UNIT, CODES
from pallas_kernels.llvm.host import host_target


def unsupported_reason(dtype: jnp.dtype) -> str | None:
    """Why pages of this type can't be read, after "no kernel for"; None if they can."""
    if dtype not in (jnp.float32, CODES):
        return f"{jnp.dtype(dtype).name} pages"
    host = host_target()
    if dtype == CODES and host.is_x86 and not host.avx2:
        return "pages of float8 on a processor without AVX2"
    return None


def load_values(name: str, address: str, value_bytes: int) -> list[str]:
    """IR that sets %name to the 16 float32 values at an address. Codes become their values over `unit(1)`: their bits,
    two of the exponent's more, are a float16's."""
    if value_bytes == 4:
        return [f" %{name} = load <16 x float>, ptr {address}, align 4"]
    return [
        f" %{name}_codes = load <16 x i8>, ptr {address}, align 1",
        f" %{name}_wide = sext <16 x i8> %{name}_codes to <16 x i16>",
        f" %{name}_high = shl <16 x i16> %{name}_wide, splat (i16 7)",
        f" %{name}_bits = and <16 x i16> %{name}_high, splat (i16 -16385)",  # without the sign's second copy
        f" %{name}_halves = bitcast <16 x i16> %{name}_bits to <16 x half>",
        f" %{name} = fpext <16 x half> %{name}_halves to <16 x float>",
    ]


def unit(value_bytes: int) -> float:
    """What values that were read must be multiplied by."""
    return 1.0 if value_bytes == 4 else CODE_UNIT
