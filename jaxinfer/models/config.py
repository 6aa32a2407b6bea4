"""ArchitectureConfig: the sizes and choices that make a model, from Hugging Face's config.json. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# What "LlamaForCausalLM" code serves: Mistral without a sliding window is the same model.
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
SUPPORTED_ENCODERS = ("BertModel",)  # for embeddings; see encoder_config.py
_ACTIVATIONS = ("silu", "swish")  # two names of one function


class UnsupportedModelError(ValueError):
    """A model this engine can't serve, or a config.json that doesn't describe one; names the field, its value and what is supported."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's: frequencies with wavelengths over original_context / low_freq_factor are divided by factor, those under
    original_context / high_freq_factor kept, the ones between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by a factor (Gemma 3's global layers)."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's (arXiv:2309.00071): pairs that turn less than slow_turns times over the original context are divided by factor, those that
    turn more than fast_turns times kept, the ones between interpolated; what is rotated grows with the factor's logarithm."""

    factor: float
    original_context: int  # tokens
    fast_turns: float = 32.0  # beta_fast
    slow_turns: float = 1.0  # beta_slow
    mscale: float | None = None  # DeepSeek's: how much what is rotated grows ...
    mscale_all_dim: float | None = None  # ... less this, by which the scores grow instead, those of all dimensions
    attention_factor: float | None = None  # what is rotated is multiplied by, where a configuration says it outright
    truncate: bool = True  # whether both bounds are moved out to whole pairs


@dataclass(frozen=True, slots=True)
class Routing:
    """How a layer's tokens choose among its experts, and what each choice counts."""

    num_experts: int
    top_k: int  # experts of a token
    scoring: Literal["softmax", "sigmoid"]  # of the router's logits
    has_bias: bool = False  # added to scores for choosing only (DeepSeek-V3's e_score_correction_bias)
    num_groups: int = 1  # experts in turn, as many in each; a token first chooses groups, by the sum of each one's best two
    top_groups: int = 1  # of them, those that a token's experts may come from
    normalises: bool = False  # a token's weights add up to 1, before they are scaled
    scale: float = 1.0  # of all weights
    scales_input: bool = False  # a weight multiplies what its expert takes, not what it gives (Llama 4)


@dataclass(frozen=True, slots=True)
class ArchitectureConfig:
    architecture: str  # such as 'LlamaForCausalLM'
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    attention_bias: bool  # of all four attention projections
    mlp_bias: bool
    sliding_window: int | None = None  # tokens; None: every layer attends to the whole context

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """From the keys of a config.json, of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

        Raises `UnsupportedModelError` naming the field.
        """
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in SUPPORTED_ARCHITECTURES:
            hint = " (an encoder is given as --embedding-model)" if architectures in [[name] for name in SUPPORTED_ENCODERS] else ""
            raise UnsupportedModelError(f"architectures is {architectures!r}: supported are {', '.join(SUPPORTED_ARCHITECTURES)}{hint}")
        activation = config.get("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise UnsupportedModelError(f"hidden_act is {activation!r}: supported are {', '.join(_ACTIVATIONS)}")
        hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        num_kv_heads = integer(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(f"num_key_value_heads is {num_kv_heads}: it must divide num_attention_heads ({num_heads})")
        head_size = integer(config, "head_dim", hidden_size // num_heads)
        if head_size % 2:
            raise UnsupportedModelError(f"head_dim is {head_size}: it must be even, for rotary embeddings")
        max_position_embeddings = integer(config, "max_position_embeddings", 2048)
        window = config.get("sliding_window")
        if window is not None and window < max_position_embeddings:
            raise UnsupportedModelError(f"sliding_window is {window!r}: only null (attention to the whole context) is supported")
        rope_theta, rope_scaling = _rope(config)
        return cls(
            architecture=architectures[0],
            num_layers=integer(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            mlp_size=integer(config, "intermediate_size"),
            vocab_size=integer(config, "vocab_size"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rms_norm_eps=positive(config, "rms_norm_eps", 1e-6),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; transformers 5 holds both in `rope_parameters`."""
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    settings = config.get(name) or {}
    if not isinstance(settings, Mapping):
        raise UnsupportedModelError(f"{name} is {settings!r}: it must be an object or null")
    theta = positive(settings if "rope_theta" in settings else config, "rope_theta", 10000.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModelError(f"{name}.rope_type is {kind!r}: supported are default, llama3")
    return theta, RopeScaling(
        factor=positive(settings, "factor", None, name),
        low_freq_factor=positive(settings, "low_freq_factor", None, name),
        high_freq_factor=positive(settings, "high_freq_factor", None, name),
        original_context=integer(settings, "original_max_position_embeddings", None, name),
    )


def integer(config: Mapping[str, Any], key: str, default: int | None = None, inside: str = "") -> int:
    """A configuration's field. Raises `UnsupportedModelError` naming it, as part of `inside`, where it is not a positive integer."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{inside}{'.' if inside else ''}{key} is {value!r}: it must be a positive integer")
    return value


def positive(config: Mapping[str, Any], key: str, default: float | None, inside: str = "") -> float:
    """The same of a positive number."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise UnsupportedModelError(f"{inside}{'.' if inside else ''}{key} is {value!r}: it must be a positive number")
    return float(value)
