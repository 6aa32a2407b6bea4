"""Pools of pages and experts' weights of more than 2^32 elements: the compiled kernels are run where all that they may read and write lies at the end of
such an array, of which there is nothing else. A place that is worked out in 32 bits, of elements or of bytes, signed or not, is another one: of nothing,
which is an error, or past the array, where the copy engine reads zeros."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.cases import TINY
from pallas_kernels.grouped_matmul.row_pieces import PieceBounds, piece_bounds
from pallas_kernels.latent_prefill_attention.page_list import PageList
from pallas_kernels.page_write import write
from pallas_kernels.paged_attention import xla as paged_xla
from pallas_kernels.paged_attention.mosaic_tiling import DecodeTiling
from pallas_kernels.ragged_prefill_attention import xla as ragged_xla
from tests.kernels import test_paged_attention_gpu as paged_attention
from tests.kernels import test_ragged_prefill_attention_gpu as ragged_prefill_attention
from tests.kernels import test_write_and_attend_gpu as write_and_attend
from tests.kernels.grouped_experts import experts
from tests.kernels.test_grouped_matmul import assert_close, interpreted, plain, rows

pytestmark = pytest.mark.aot

FAR = 2**32  # elements before those there are, of each layer's keys, of the weights
PAGES = 2  # a pool's axis


def prefill() -> None:
    inputs = ragged_prefill_attention.arguments((0, 32), (0, 60), (30, 20), 64, num_heads=2)
    ragged_prefill_attention.check(inputs, ragged_prefill_attention.PrefillTiling(2, 64, 2))


@pytest.mark.parametrize(
    ("module", "kernel", "pool", "page_ids", "check"),
    [
        (paged_attention, "paged_attention_and_lse", 1, (3,), lambda: paged_attention.check((130, 5), tiling=DecodeTiling(64, 2, 2))),
        (paged_attention, "paged_attention_and_lse", 1, (3,), paged_attention.test_latents_of_several_tokens),
        (write_and_attend, "write_and_attend", 3, (5, 6), lambda: write_and_attend.check((130, 5))),
        (ragged_prefill_attention, "ragged_prefill_attention", 1, (3,), prefill),
    ],
    ids=["decode", "decode, latents", "writing and decode", "prefill"],
)
def test_pages_at_the_end_of_a_pool(larger, monkeypatch, module, kernel, pool, page_ids, check):
    """Some of a layer in the middle; `pool` and `page_ids`: which of the kernel's arguments they are."""
    function = getattr(module, kernel)

    def call(*arguments: Any, **options: Any) -> Any:
        shape = arguments[pool].shape
        num_before = FAR // math.prod(shape[PAGES + 1 :])
        larger[shape] = PAGES, num_before + shape[PAGES]
        return function(*(each + num_before if i in page_ids else each for i, each in enumerate(arguments)), **options)

    monkeypatch.setattr(module, kernel, call)
    check()


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.format)
def test_the_last_experts_of_many(larger, monkeypatch, case):
    """Their work is as if those before had no rows."""
    random, sizes = np.random.default_rng(8), (7, 0, 9, 1, 2)
    weights, matrices = experts(case, random)
    leaves = jax.tree.leaves(weights)
    num_before = FAR // math.prod(leaves[0].shape[1:])
    larger |= {leaf.shape: (0, num_before + len(leaf)) for leaf in leaves}

    def work_of_all(*arguments: Any) -> PieceBounds:
        work = piece_bounds(*arguments)
        ends = {name: jnp.pad(getattr(work, name), (num_before, 0)) for name in ("row_ends", "piece_ends")}
        return work._replace(owner=work.owner + num_before, **ends)

    monkeypatch.setattr(mosaic_gpu, "piece_bounds", work_of_all)
    x = rows(case, random)
    assert_close(interpreted(x, weights, jnp.array(sizes)), plain(x, matrices, sizes))


@pytest.mark.parametrize("name", ["decode", "prefill", "write", "latents"])
def test_xla_has_no_dimension_that_an_index_can_not_count(compile_for, name):
    """XLA's indices are int32, one for each dimension, and so is what they are worked out from: so is every row of a pool that fills a card,
    but not every element of it. How XLA goes on from there is its own: it takes 64 bits where they are needed."""
    int32, bfloat16, rows = jnp.int32, jnp.bfloat16, ((2,), jnp.int32)
    pool, table = ((4, 2, 350_000, 8, 16, 128), bfloat16), ((2, 64), int32)
    latents = ((4, 1, 700_000, 1, 64, 576), bfloat16)
    options = {"scale": 0.1, "pool_is_finite": True}
    one = ((), int32)
    given: dict[str, tuple[Any, ...]] = {
        "decode": (partial(paged_xla.paged_attention, **options), ((2, 32, 128), bfloat16), pool, one, table, rows),
        "prefill": (
            partial(ragged_xla.ragged_prefill_attention, query_tile=64, **options),
            ((128, 32, 128), bfloat16),
            *(pool, one, table, rows, rows, rows),
        ),
        "write": (
            lambda k, v, pool, *place: write(pool, place[0], (k, v), *place[1:]),
            *[((2, 8, 128), bfloat16)] * 2,
            pool,
            one,
            rows,
            rows,
        ),
        "latents": (lambda pool, *of: PageList.for_rows(pool, *of, axis=None).read_whole(jnp.arange(64)), latents, one, table, rows),
    }
    function, *arguments = given[name]
    assert math.prod(pool[0]) > FAR and math.prod(latents[0]) > FAR
    text = compile_for(function, *arguments, donate=(2,) if name == "write" else ()).as_text()
    dimensions = {int(size) for sizes in re.findall(r"\b(?:bf16|f32|s32|u32|s64|pred)\[([\d,]+)\]", text) for size in sizes.split(",")}
    assert max(dimensions) < 2**31 and "s64[" not in text
