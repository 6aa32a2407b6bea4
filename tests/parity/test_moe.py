"""Expert layers against the reference's own, of the same random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from jax import numpy as jnp
from transformers import DeepseekV3Config, Llama4TextConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from jaxinfer.architecture.model_config import Routing
from jaxinfer.layers.moe import MixtureOfExperts
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from tests.layers.on_mesh import on_mesh

pytestmark = pytest.mark.parity

SIZE, INNER = 64, 48
SIZES: dict[str, Any] = {"hidden_size": SIZE, "hidden_act": "silu", "num_experts_per_tok": 4}
DEEPSEEK: dict[str, Any] = {**SIZES, "moe_intermediate_size": INNER, "n_routed_experts": 16, "n_shared_experts": 2}


def llama4() -> tuple[torch.nn.Module, Routing]:
    settings = SIZES | {"num_experts_per_tok": 1, "intermediate_size": INNER, "num_local_experts": 16}
    return Llama4TextMoe(Llama4TextConfig(**settings)), Routing(16, 1, "sigmoid", scales_input=True)


def deepseek() -> tuple[torch.nn.Module, Routing]:
    config = DeepseekV3Config(**DEEPSEEK, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5)
    return DeepseekV3MoE(config), Routing(16, 4, "sigmoid", has_bias=True, num_groups=4, top_groups=2, normalises=True, scale=2.5)


def kimi() -> tuple[torch.nn.Module, Routing]:
    config = DeepseekV3Config(
        **DEEPSEEK | {"n_shared_experts": 1}, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827
    )
    return DeepseekV3MoE(config), Routing(16, 4, "sigmoid", has_bias=True, normalises=True, scale=2.827)


def deepseek_unnormalised() -> tuple[torch.nn.Module, Routing]:
    config = DeepseekV3Config(**DEEPSEEK, n_group=8, topk_group=3, norm_topk_prob=False, routed_scaling_factor=1.0)
    return DeepseekV3MoE(config), Routing(16, 4, "sigmoid", has_bias=True, num_groups=8, top_groups=3)


def qwen3(normalises: bool = True) -> tuple[torch.nn.Module, Routing]:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=INNER, num_experts=16, norm_topk_prob=normalises)
    return Qwen3MoeSparseMoeBlock(config), Routing(16, 4, "softmax", normalises=normalises)


def mixtral() -> tuple[torch.nn.Module, Routing]:
    config = MixtralConfig(**SIZES | {"num_experts_per_tok": 2}, intermediate_size=INNER, num_local_experts=8)
    return MixtralSparseMoeBlock(config), Routing(8, 2, "softmax", normalises=True)


BLOCKS = {
    "llama4": llama4,
    "deepseek": deepseek,
    "kimi": kimi,
    "deepseek_unnormalised": deepseek_unnormalised,
    "qwen3": qwen3,
    "qwen3_unnormalised": lambda: qwen3(normalises=False),
    "mixtral": mixtral,
}


def values_of(block: torch.nn.Module, inner: int) -> dict[str, np.ndarray]:
    """Ours by the reference's. All but Llama 4's experts lie there with their outputs first."""
    theirs = {name: value.numpy() for name, value in block.state_dict().items()}
    gate_up, down = theirs["experts.gate_up_proj"], theirs["experts.down_proj"]
    if gate_up.shape[1] != SIZE:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    router = theirs.get("gate.weight", theirs.get("router.weight"))
    values = {"router.kernel": router.T, "experts.gate_up": gate_up.reshape(len(gate_up), SIZE, 2, inner), "experts.down": down}
    if "gate.e_score_correction_bias" in theirs:
        values["router.bias"] = theirs["gate.e_score_correction_bias"]
    shared = next((name.split(".")[0] for name in theirs if name.startswith("shared_expert")), None)
    if shared:
        gate, up, down = (theirs[f"{shared}.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        values |= {"shared.gate_up.kernel": np.stack([gate, up], 1), "shared.down.kernel": down}
    return values


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
@pytest.mark.parametrize("name", BLOCKS)
def test_an_expert_layer_is_the_references(name: str, devices: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    block, routing = BLOCKS[name]()
    for tensor in (*block.parameters(), *block.buffers()):
        torch.nn.init.normal_(tensor, std=0.2)
    values = values_of(block.eval(), INNER)
    shared_size = values["shared.down.kernel"].shape[0] if "shared.down.kernel" in values else None
    ours = on_mesh(
        MixtureOfExperts(SIZE, INNER, routing, ModelWeightFormat(Plain(jnp.dtype("float32"))), shared_size=shared_size), values, devices
    )
    x = torch.randn(3, 17, SIZE)
    with torch.no_grad():
        expected = block(x)
    expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(-1, SIZE).numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(ours(x.reshape(-1, SIZE).numpy()), expected, atol=1e-4)
