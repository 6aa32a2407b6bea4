"""Pools of pages and experts' weights of more than 2^32 elements: the compiled kernels are run where all that they may read and write lies at the end of
such an array, of which there is nothing else. A place that is worked out in 32 bits, of elements or of bytes, signed or not, is another one: of nothing,
which is an error, or past the array, where the copy engine reads zeros."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.cases import TINY
from pallas_kernels.grouped_matmul.work import Work, work_for
from pallas_kernels.paged_attention.mosaic_tiling import Tiling
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
    ragged_prefill_attention.check(inputs, ragged_prefill_attention.Tiling(2, 64, 2))


@pytest.mark.parametrize(
    ("module", "kernel", "pool", "page_ids", "check"),
    [
        (paged_attention, "paged_attention_and_lse", 1, (3,), lambda: paged_attention.check((130, 5), tiling=Tiling(64, 2, 2))),
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

    def work_of_all(*arguments: Any) -> Work:
        work = work_for(*arguments)
        ends = {name: jnp.pad(getattr(work, name), (num_before, 0)) for name in ("row_ends", "piece_ends")}
        return work._replace(owner=work.owner + num_before, **ends)

    monkeypatch.setattr(mosaic_gpu, "work_for", work_of_all)
    x = rows(case, random)
    assert_close(interpreted(x, weights, jnp.array(sizes)), plain(x, matrices, sizes))
