"""What the two programs say between devices, counted in the compiled code; and that pages are updated where they lie."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.runtime.compilation import compile_program
from sharding.rules import TENSOR_PARALLEL
from tests import model_on_mesh
from tests.tiny_model import HIDDEN, LAYERS, VOCAB

COLLECTIVES = r"= (\w+\[[\d,]*\])\S* (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
RUNNERS = {"prefill": (PrefillRunner, 128), "decode": (DecodeRunner, 8)}


def compiled(model: model_on_mesh.OnMesh, role: str):
    runner, size = RUNNERS[role]
    attention = "llvm_cpu" if model.template.form.is_packed else "xla"
    return compile_program(runner(model.template, model.mesh, TENSOR_PARALLEL, model.pool, (size,), 256, attention).programs()[0])


@pytest.mark.parametrize("role", RUNNERS)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
def test_two_devices_add_up_once_an_attention_and_once_an_mlp(tiny_model_path, role, is_packed):
    program = compiled(model_on_mesh.put(tiny_model_path, (0, 1), num_pages=512, is_packed=is_packed), role)
    found = Counter(re.findall(COLLECTIVES, program.as_text()))
    num_tokens = RUNNERS[role][1]
    # One more sum is the embedding's, whose rows are spread over the devices; the scores of the rows that sample are brought together,
    # in one place or the other: batches of plain greedy rows have a branch of their own.
    expected = Counter({(f"f32[{num_tokens},{HIDDEN}]", "all-reduce"): 2 * LAYERS})
    expected[f"f32[{num_tokens},{HIDDEN}{',1' if is_packed else ''}]", "all-reduce"] += 1
    num_sampled = {"prefill": 4, "decode": num_tokens}[role]
    expected[f"f32[{num_sampled},{VOCAB}]", "all-gather"] += 1
    expected[f"f32[{num_sampled},{VOCAB}]" if is_packed else f"f32[{VOCAB},{num_sampled}]", "all-gather"] += 1
    if role == "prefill":
        expected[f"f32[32,{VOCAB}]", "all-gather"] += 1  # where prompt log-probabilities are asked for, a tile of tokens at a time
    assert found == expected


@pytest.mark.parametrize("role", RUNNERS)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
def test_one_device_says_nothing_and_copies_no_pages(tiny_model_path, role, is_packed):
    model = model_on_mesh.put(tiny_model_path, (0,), num_pages=4096, page_size=16, is_packed=is_packed)
    program = compiled(model, role)
    assert not re.findall(COLLECTIVES, program.as_text())
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= model.pool.device_bytes
    assert memory.temp_size_in_bytes < model.pool.device_bytes / 8
