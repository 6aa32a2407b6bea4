"""A GGUF file of a family is the model that its safetensors are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxinfer import LLM
from tests import model_on_mesh
from tests.families import checkpoint, gguf_file
from tests.families.serving import GREEDY, SETTINGS, check_continuation
from tests.golden.family_logits.read import load


def test_a_gguf_of_gemma_3_is_served_with_the_references_tokens(tmp_path: Path) -> None:
    config = checkpoint.config_of("gemma_3")
    tensors = checkpoint.tensors(config, checkpoint.shapes_of("gemma_3"))
    llm = LLM(str(gguf_file.write(tmp_path / "tiny.gguf", gguf.MODEL_ARCH.GEMMA3, config, tensors)), **SETTINGS)
    goldens = load("gemma_3")
    for golden, output in zip(goldens, llm.generate([golden.prompt_ids for golden in goldens], GREEDY), strict=True):
        check_continuation(golden, output)


# A GGUF of Qwen3 has no windows, one of its models of experts has them in every layer.
QWEN: dict[gguf.MODEL_ARCH, tuple[str, dict[str, Any]]] = {
    gguf.MODEL_ARCH.QWEN2: ("qwen2", {"head_dim": 8}),
    gguf.MODEL_ARCH.QWEN3: ("qwen3", {"use_sliding_window": False, "sliding_window": None}),
    gguf.MODEL_ARCH.QWEN3MOE: ("qwen3_moe", {"num_hidden_layers": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}),
}


@pytest.mark.parametrize("architecture", QWEN, ids=lambda architecture: architecture.name)
def test_a_gguf_of_qwen_gives_the_logits_of_its_safetensors(tmp_path: Path, architecture: gguf.MODEL_ARCH) -> None:
    family, changes = QWEN[architecture]
    config, shapes = checkpoint.config_of(family) | changes, checkpoint.shapes_of(family)
    if "decoder_sparse_step" in changes:  # the second layer twice: it has experts
        inner = {name: shape for name, shape in shapes.items() if ".layers." not in name}
        shapes = inner | {name.replace(".1.", f".{i}.", 1): shapes[name] for name in shapes if ".layers.1." in name for i in (0, 1)}
    folder = checkpoint.write(tmp_path / "folder", config, shapes)
    file = gguf_file.write(tmp_path / "tiny.gguf", architecture, config, checkpoint.tensors(config, shapes))
    token_ids = np.random.default_rng(0).integers(0, 512, 40).tolist()
    expected = model_on_mesh.put(folder, (0,)).plain_logits(token_ids)
    assert expected.std() > 1
    np.testing.assert_array_equal(model_on_mesh.put(file, (0,)).plain_logits(token_ids), expected)
