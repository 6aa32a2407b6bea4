"""What work is, and what a card's rates make of it."""

import dataclasses

import numpy as np
import pytest

from benchmarks.gpu import grouped_matmul, paged_attention, predictions, roofline
from benchmarks.gpu.roofline import DATASHEET, CardRates, RooflineWork
from benchmarks.gpu.sizes import FULL, LLAMA_8B, SMALL
from pallas_kernels.grouped_matmul.cases import CASES


def test_the_larger_of_the_two_times_is_the_floor():
    rates = CardRates(bytes_per_s=10.0, flops_per_s=100.0)
    moving, computing = RooflineWork(50.0, 100.0), RooflineWork(10.0, 700.0)
    assert rates.floor(moving) == 5.0 and rates.bound(moving) == "copy"
    assert rates.floor(computing) == 7.0 and rates.bound(computing) == "matmul"
    assert rates.share(computing, 14.0) == 0.5
    assert moving.times(2) + computing == RooflineWork(110.0, 900.0)


def test_decode_attention_reads_all_keys_and_values_once():
    work = roofline.decode_attention(batch=3, context=5, num_heads=8, num_kv_heads=2, head_size=4, itemsize=2)
    assert work.num_bytes == 3 * (2 * 5 * 2 * 4 + 2 * 8 * 4) * 2
    assert work.num_flops == sum(2 * 2 * 4 for _ in range(3 * 8 * 5))  # a score and a weighted value each


def test_what_decode_attention_reads_is_what_its_inputs_have():
    """float8 pages weigh half; of latents there is one side, read once for keys and values."""
    found = {name: case for name, case in paged_attention.cases(FULL).items() if "batch 128, context 4096" in name}
    assert len(found) == 3
    assert found["batch 128, context 4096"].work == FULL.decode_attention(128, 4096)
    for name, case in paged_attention.cases(SMALL).items():
        problem = paged_attention.problem(dataclasses.replace(SMALL, cache_bytes=1), case, seed=0)
        kv, table = problem.shared[:2]
        tokens = table.size * case.shape.page_size
        cached = kv.nbytes * tokens / (kv.shape[2] * case.shape.page_size)
        rows = problem.carry.nbytes / problem.carry.shape[-1] * (case.shape.head_size + (case.value_size or case.shape.head_size))
        narrow = 2 / problem.carry.dtype.itemsize if case.has_scales else 1
        assert case.work.num_bytes == pytest.approx(cached * case.context / (table.shape[1] * case.shape.page_size) + rows * narrow), name


def test_prefill_attention_is_the_triangle():
    work = roofline.prefill_attention(num_tokens=6, num_heads=4, num_kv_heads=2, head_size=8, itemsize=2)
    assert work.num_flops == sum(2 * 2 * 8 for _ in range(4) for query in range(6) for key in range(6) if key <= query)
    assert work.num_bytes == 6 * (4 + 4 + 2 + 2) * 8 * 2
    after = roofline.prefill_attention(num_tokens=6, num_heads=4, num_kv_heads=2, head_size=8, itemsize=2, num_cached=10)
    assert after.num_flops == work.num_flops + sum(2 * 2 * 8 for _ in range(4) for query in range(6) for key in range(10))
    assert after.num_bytes == work.num_bytes + 10 * (2 + 2) * 8 * 2


def test_llamas_weights_are_eight_billion():
    numbers = LLAMA_8B.num_layers * LLAMA_8B.layer_weights + 2 * LLAMA_8B.head_weights
    norms = (2 * LLAMA_8B.num_layers + 1) * LLAMA_8B.hidden_size
    assert numbers + norms == 8_030_261_248  # of the checkpoint


def test_a_decode_step_reads_the_weights_and_every_cached_token():
    one, two = FULL.decode_step(8, 512), FULL.decode_step(8, 1024)
    token = 2 * 2 * LLAMA_8B.num_kv_heads * LLAMA_8B.head_size * LLAMA_8B.num_layers
    assert two.num_bytes - one.num_bytes == 8 * 512 * token
    weights = 2 * (LLAMA_8B.num_layers * LLAMA_8B.layer_weights + LLAMA_8B.head_weights)
    assert one.num_bytes == pytest.approx(weights + 8 * 512 * token, rel=1e-3)


def test_a_prefill_step_multiplies_every_token_by_the_layers_and_one_by_the_head():
    flops = FULL.prefill_step(2048).num_flops - 32 * FULL.prefill_attention(2048).num_flops
    assert flops == 2 * (2048 * 32 * LLAMA_8B.layer_weights + LLAMA_8B.head_weights)


def test_experts_without_rows_are_not_read():
    case = dataclasses.replace(CASES[0], num_experts=4, inputs=128, outputs=256)
    assert case.format == "bfloat16"
    work = grouped_matmul.work(case, np.asarray([3, 0, 1, 0]))
    assert work.num_bytes == 2 * (2 * 128 * 256 * 2 + 4 * (128 + 256) * 2)
    assert work.num_flops == 2 * 2 * 4 * 128 * 256
    quarter = grouped_matmul.work(dataclasses.replace(case, format="int4"), np.asarray([3, 0, 1, 0]))
    assert work.num_bytes - quarter.num_bytes == 2 * 2 * 128 * 256 * (2 - 4.5 / 8)


def test_what_packed_weights_weigh_is_what_their_arrays_have():
    for case in (dataclasses.replace(case, num_experts=2, inputs=256, outputs=256) for case in CASES):
        weights = grouped_matmul.weights(case, seed=0)
        arrays = weights if isinstance(weights, tuple) else (weights,)
        matrices = grouped_matmul.work(case, np.asarray([1, 1])).num_bytes / 2 - 2 * (256 + 256) * 2
        assert sum(a.nbytes for a in arrays) == matrices, case.name


def test_predictions_have_a_line_for_each_thing_and_mark_the_larger_time():
    page = predictions.page(FULL).splitlines()
    assert len(page) == 2 + len(list(predictions.works(FULL)))
    line = next(line for line in page if "paged_attention | batch 128, context 4096" in line)
    seconds = FULL.decode_attention(128, 4096).num_bytes / DATASHEET["h200"].bytes_per_s
    assert f"**{seconds * 1e6:.1f} us**" in line
