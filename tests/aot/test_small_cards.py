"""The kernels compile for cards whose blocks have less than half of Hopper's shared memory, as those for workstations (compute capability 12.0),
as far as they fit, and say so where they don't."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.paged_attention.op import unsupported_reason as unsupported_decode_reason
from pallas_kernels.ragged_prefill_attention.op import unsupported_reason as unsupported_prefill_reason
from tests.aot.conftest import num_kernels
from tests.aot.test_grouped_matmul import compile_grouped
from tests.aot.test_latent_attention import compile_latents
from tests.aot.test_paged_attention import compile_paged
from tests.aot.test_ragged_prefill_attention import compile_ragged

pytestmark = pytest.mark.aot
BFLOAT16, FLOAT8 = jnp.dtype("bfloat16"), jnp.dtype("float8_e4m3fn")


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "options"),
    [
        (9, 3, 64, {}),
        (32, 8, 96, {"page_size": 128}),
        (32, 8, 128, {"num_tokens": 4}),
        (32, 8, 128, {"dtype": FLOAT8}),
    ],
)
def test_decode_attention(compile_for, card, num_heads, num_kv_heads, head_size, options):
    assert (
        unsupported_decode_reason("mosaic_gpu", options.get("dtype", BFLOAT16), head_size, options.get("page_size", 16), card=card) is None
    )
    assert num_kernels(compile_paged(compile_for, 32, num_heads, num_kv_heads, head_size, **options)) == 1


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(9, 3, 64), (32, 8, 128), (64, 8, 192)])
def test_prefill_attention(compile_for, card, num_heads, num_kv_heads, head_size):
    assert unsupported_prefill_reason("mosaic_gpu", BFLOAT16, head_size, 16, 32, card=card) is None
    assert num_kernels(compile_ragged(compile_for, 512, num_heads, num_kv_heads, head_size)) == 1


def test_prefill_attention_over_latents(compile_for):
    compiled = compile_latents(compile_for, num_heads=16, num_tokens=512, num_pages=1000, row_pages=100)
    assert num_kernels(compiled) == 1


@pytest.mark.parametrize("num_tokens", [1, 8192])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_with_experts(compile_for, case, num_tokens):
    assert num_kernels(compile_grouped(compile_for, case, case.inputs, case.outputs, num_tokens)) == 1


def test_what_does_not_fit_is_said(card):
    words = "on a card with 101376 bytes of shared memory a block"
    for dtype, head_size, is_latent in ((BFLOAT16, 192, False), (BFLOAT16, 256, False), (BFLOAT16, 576, True), (FLOAT8, 192, False)):
        assert words in str(unsupported_decode_reason("mosaic_gpu", dtype, head_size, 16, is_latent=is_latent, card=card))
    assert words in str(unsupported_prefill_reason("mosaic_gpu", BFLOAT16, 256, 16, 32, card=card))
