"""Every family live against the reference: models of its class, filled, saved by the class and served, over prompts the golden files don't have.

Beside the configurations of tests/golden/family_logits each family has others here: further heads, biases, scalings, kinds of layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from tests import tiny_model
from tests.families import checkpoint
from tests.golden.family_logits import write
from tests.golden.family_logits.read import FOLDER, NAMES
from tests.golden.read import CLOSE_CALL, MAX_LOGIT_DIFFERENCE, first_difference
from tests.parity import reference

pytestmark = pytest.mark.parity

FAMILIES = sorted(file.parent.name for file in FOLDER.glob("*/config.json"))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {  # a family, and what is changed in its configuration
    "llama_3_with_biases": (
        "llama_3",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "mistral_without_a_window": ("mistral", {"sliding_window": None, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 24}),
    "qwen2_with_windows": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 14,
            "max_window_layers": 1,
            "rope_scaling": YARN,
            "tie_word_embeddings": False,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3_with_yarn": (
        "qwen3",
        {
            "use_sliding_window": False,
            "rope_scaling": YARN,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        },
    ),
    "qwen3_moe_with_a_window": (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 18,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": 3,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    "gemma_3_plain": (
        "gemma_3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "rope_scaling": None,
            "rope_local_base_freq": 2500.0,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2_with_biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "deepseek_v3_of_another_kind": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "rope_scaling": None,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
        },
    ),
    "deepseek_v3_with_mscale": (
        "deepseek_v3",
        {
            "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.3},
            "max_position_embeddings": 256,
            "first_k_dense_replace": 3,
        },
    ),
    "llama_4_of_another_kind": (
        "llama_4",
        {
            "moe_layers": [0, 3],
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_chunk_size": 48,
            "no_rope_layers": [1, 0, 1, 0, 1],
            "rope_scaling": None,
        },
    ),
}


def configuration(name: str) -> dict[str, Any]:
    if name not in OTHERS:
        return checkpoint.config_of(name)
    family, changes = OTHERS[name]
    config = checkpoint.config_of(family)
    return config | ({"text_config": config["text_config"] | changes} if "text_config" in config else changes)


# What has a golden file under its own name is compared with that by `make test`, and here by `make test-parity ARGS="-m parity"`.
CASES = [pytest.param(name, marks=pytest.mark.exhaustive if name in NAMES else ()) for name in (*FAMILIES, *OTHERS)]


@pytest.mark.parametrize("name", CASES)
def test_a_model_saved_by_its_class_gives_the_references_logits_and_tokens(tmp_path: Path, name: str) -> None:
    config, saved = configuration(name), tmp_path / "saved"
    model = write.load(checkpoint.write(tmp_path / "made", config, write.saved_shapes(config, tmp_path / "empty")))
    model.save_pretrained(saved, max_shard_size="200KB")
    assert len(list(saved.glob("*.safetensors"))) > 1
    tiny_model.write_tokenizer(saved)
    llm = LLM(
        str(saved),
        dtype="float32",
        kv_memory="4MiB",
        page_size=16,
        max_model_len=256,
        prefill_buckets=(64,),
        prefill_chunk_size=64,
        max_batch_size=2,
        decode_buckets=(2,),
    )
    prompts = [np.random.default_rng(length).integers(0, 512, length).tolist() for length in (200, 11)]
    assert np.abs(llm.logits(prompts[0]) - reference.all_logits(model, prompts[0])).max() < MAX_LOGIT_DIFFERENCE
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    num_clear = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, scores = reference.greedy(model, prompt, 32)
        best = np.sort(scores, axis=-1)
        margins = best[:, -1] - best[:, -2]
        assert first_difference(output.outputs[0].token_ids, tokens.tolist(), margins) is None
        num_clear += int(np.argmax(np.append(margins, 0.0) < CLOSE_CALL))
    assert num_clear > 32  # steps before a close call, of both: what the comparison above was of
