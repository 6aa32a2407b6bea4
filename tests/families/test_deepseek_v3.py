"""DeepSeek-V3's modules for further tokens, which the reference's class leaves out, and what is refused of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.hub import open_source
from checkpoints.source import CheckpointError
from jaxinfer.architecture.model_config import UnsupportedModelError
from jaxinfer.models.deepseek_v3 import DeepseekV3
from jaxinfer.models.registry import config_of, read_config
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.load import check_tensors, load_weights, weight_bytes
from jaxinfer.weights.template import make_template, template_of
from sharding.mesh import make_mesh
from sharding.rules import TENSOR_PARALLEL
from tests import model_on_mesh
from tests.families import checkpoint, deepseek
from tests.golden.family_logits.read import load

CONFIG = checkpoint.config_of("deepseek_v3")
MODULE = "model.layers.3."
TENSORS = checkpoint.tensors(CONFIG, deepseek.shapes_of(CONFIG))


def write(folder: Path, left_out: tuple[str, ...] = (), **config: Any) -> Path:
    return deepseek.write(
        folder, CONFIG | config, {name: tensor for name, tensor in TENSORS.items() if not name.startswith(left_out or ("-",))}
    )


@pytest.mark.parametrize("left_out", [(), (MODULE + "embed_tokens", MODULE + "shared_head.head")])
@pytest.mark.parametrize("is_packed", [True, False])
def test_no_device_holds_a_module(tmp_path: Path, left_out: tuple[str, ...], is_packed: bool) -> None:
    on_mesh = model_on_mesh.put(write(tmp_path / "with", left_out), (0, 1), is_packed=is_packed)
    without = model_on_mesh.put(write(tmp_path / "without", (MODULE,)), (0, 1), is_packed=is_packed)
    (golden, *_) = load("deepseek_v3")
    assert golden.prefill.difference(on_mesh.plain_logits(golden.prompt_ids)[golden.prefill_positions]) < 2e-3
    assert weight_bytes(on_mesh.weights) == weight_bytes(without.weights)


def test_a_module_can_be_loaded(tmp_path: Path) -> None:
    """For what will run it."""
    source = open_source(write(tmp_path))
    form, mesh = ModelWeightFormat(Plain(jnp.dtype("float32"))), make_mesh((0, 1))
    template = template_of(DeepseekV3, config_of(source).on_devices(2), form, form.vector_dtype, has_unread=True)
    module = template.merge(load_weights(template, source, mesh, TENSOR_PARALLEL)).mtp["3"]

    def has(parameter: Any, *names: str, transpose: bool = True) -> None:
        tensors = [TENSORS[f"{MODULE}{name}.weight"] for name in names]
        value = np.asarray(parameter[...])
        joined = np.concatenate([tensor.T if transpose and tensor.ndim == 2 else tensor for tensor in tensors], -1)
        np.testing.assert_array_equal(value.reshape(joined.shape), joined)

    has(module.embedding_norm.scale, "enorm")
    has(module.hidden_norm.scale, "hnorm")
    has(module.join.kernel, "eh_proj")
    has(module.norm.scale, "shared_head.norm")
    has(module.block.attention_norm.scale, "input_layernorm")
    has(module.block.mlp_norm.scale, "post_attention_layernorm")
    has(module.block.attention.down.kernel, "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    has(module.block.attention.query_norm.scale, "self_attn.q_a_layernorm")
    has(module.block.attention.query_up.kernel, "self_attn.q_b_proj")
    has(module.block.attention.norm.scale, "self_attn.kv_a_layernorm")
    has(module.block.attention.up, "self_attn.kv_b_proj", transpose=False)
    has(module.block.attention.out.kernel, "self_attn.o_proj")
    has(module.block.mlp.router.kernel, "mlp.gate")
    np.testing.assert_array_equal(module.block.mlp.router.bias[...], TENSORS[MODULE + "mlp.gate.e_score_correction_bias"])
    has(module.block.mlp.shared.gate_up.kernel, "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    has(module.block.mlp.shared.down.kernel, "mlp.shared_experts.down_proj")
    for expert in range(CONFIG["n_routed_experts"]):
        has(module.block.mlp.experts.gate_up[expert], f"mlp.experts.{expert}.gate_proj", f"mlp.experts.{expert}.up_proj")
        has(module.block.mlp.experts.down[expert], f"mlp.experts.{expert}.down_proj")


def test_a_checkpoint_without_modules_is_served_though_its_configuration_has_them(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, (MODULE,)))
    assert config_of(source).family.num_mtp == 0
    check_tensors(make_template(config_of(source), ModelWeightFormat(Plain(jnp.dtype("float32")))), source)


@pytest.mark.parametrize(
    ("left_out", "config", "message"),
    [
        (MODULE + "hnorm.weight", {}, "tensor 'model.layers.3.hnorm.weight' is missing"),
        (
            MODULE + "eh_proj.weight",
            {},
            "tensors 'model.layers.3.enorm.weight', .* in the checkpoint but not in a model of this configuration",
        ),
        ("-", {"num_nextn_predict_layers": 2}, "tensors 'model.layers.4.eh_proj.weight', .* missing"),
        ("-", {"num_nextn_predict_layers": 0}, "tensors 'model.layers.3.eh_proj.weight', .* in the checkpoint but not"),
    ],
)
def test_a_module_in_part_is_refused(tmp_path: Path, left_out: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        model_on_mesh.put(write(tmp_path, (left_out,), **config), (0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax': only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy': only 'noaux_tc' is supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2: only 1 is supported"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7: it must be even"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None: it must be a positive integer"),
        ({"attention_bias": True}, "attention_bias is true: with a q_lora_rank only false is supported"),
        ({"n_group": 3}, r"n_group is 3: it must divide n_routed_experts \(8\)"),
        ({"n_group": 8}, r"n_group is 8: it must divide n_routed_experts \(8\), with 2 or more in each"),
        ({"topk_group": 5}, "topk_group is 5: n_group is 4"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok is 5: topk_group \(2\) of 2 experts have fewer"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1: it must be a positive integer"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_supported_is_named_with_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(CONFIG | changes)


def test_a_text_model_that_is_not_there_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="text_config is None: it must be an object"):
        read_config({"architectures": ["KimiK25ForConditionalGeneration"]})
