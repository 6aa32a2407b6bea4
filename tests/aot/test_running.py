"""The compiled kernels, run: tests that JAX's interpreter runs of them, with what the compiler makes of them for a GPU instead, its PTX, on a machine of
NumPy. It has no say on what ptxas makes of that, nor on time. Some of each kernel's; `test_running_more` has the others."""

from __future__ import annotations

import pytest

from pallas_kernels.grouped_matmul.cases import TINY_LOSSLESS
from tests.kernels import test_grouped_matmul as grouped_matmul
from tests.kernels import test_latent_prefill_attention_gpu as latent_prefill_attention
from tests.kernels import test_paged_attention_gpu as paged_attention
from tests.kernels import test_ragged_prefill_attention_gpu as ragged_prefill_attention
from tests.kernels import test_split_combine as split_combine
from tests.kernels import test_write_and_attend_gpu as write_and_attend

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("run_as_compiled")]

test_decode_attention_in_shapes_of_models = paged_attention.test_the_shapes_of_real_models
test_decode_attention_over_kv_splits = paged_attention.test_kv_splits_are_combined
test_decode_attention_of_several_tokens_of_latents = paged_attention.test_latents_of_several_tokens
test_decode_attention_over_float8_pages = paged_attention.test_float8_pages_are_widened_and_scaled
test_prefill_attention_of_any_requests = ragged_prefill_attention.test_requests_of_any_length_in_any_order
test_prefill_attention_where_some_see_nothing_of_a_tile = ragged_prefill_attention.test_queries_that_see_nothing_of_a_tile_before_others
test_prefill_attention_over_kv_splits = ragged_prefill_attention.test_kv_splits_are_combined
test_prefill_attention_over_latents = latent_prefill_attention.test_it_is_attention_over_expanded_latents
test_writing_with_decode_attention = write_and_attend.test_contexts_that_end_anywhere_in_a_page_and_in_a_tile
test_combining_splits = split_combine.test_each_counts_for_what_it_weighs
test_products_with_experts_in_splits = grouped_matmul.test_the_gpus_kernel_with_one_experts_rows_and_with_few_and_with_none


@pytest.mark.parametrize("case", grouped_matmul.TINY, ids=lambda case: case.format)
def test_products_with_experts(case):
    grouped_matmul.test_rows_and_experts_do_not_touch_each_other(case, grouped_matmul.interpreted)


@pytest.mark.parametrize("case", grouped_matmul.TINY[1:], ids=lambda case: case.format)
def test_products_of_many_rows_with_packed_experts(case):
    grouped_matmul.test_rows_and_experts_do_not_touch_each_other(case, grouped_matmul.of_many_rows)


def test_products_with_lossless_weights():
    for tiling in (grouped_matmul.interpreted, grouped_matmul.of_many_rows):
        grouped_matmul.test_rows_and_experts_do_not_touch_each_other(TINY_LOSSLESS, tiling)
