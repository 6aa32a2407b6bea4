"""ArchitectureConfig: sizes and choices of a model, from Hugging Face's config.json. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from jaxinfer.architecture.head_layout import HeadLayout
from pallas_kernels.span import FULL_ATTENTION, Span

SUPPORTED_ENCODERS = ("BertModel",)  # for embeddings; see encoder_config.py


class UnsupportedModelError(ValueError):
    """A model that this engine can't serve, or a config.json that doesn't describe one. The message names the field,
    its value and what is supported."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's. Frequencies with wavelengths over original_context / low_freq_factor are divided by `factor`. Those
    under original_context / high_freq_factor stay; the ones between are interpolated."""

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
    """YaRN's (arXiv:2309.00071). Dimension pairs that turn less than slow_turns times over the original context are
    divided by `factor`. Those that turn more than fast_turns times stay; the ones between are interpolated. Rotated
    queries and keys are scaled with the factor's logarithm."""

    factor: float
    original_context: int  # tokens
    fast_turns: float = 32.0  # beta_fast
    slow_turns: float = 1.0  # beta_slow
    mscale: float | None = None  # DeepSeek's: scales rotated queries and keys, relative to mscale_all_dim
    mscale_all_dim: float | None = None  # DeepSeek's: scales attention scores, over all dimensions
    attention_factor: float | None = None  # multiplies rotated queries and keys, where a configuration gives it
    truncate: bool = True  # whether both bounds are rounded outwards to whole pairs


@dataclass(frozen=True, slots=True)
class Routing:
    """How a mixture-of-experts layer chooses experts for a token, and how it weights their outputs."""

    num_experts: int
    top_k: int  # experts of a token
    scoring: Literal["softmax", "sigmoid"]  # of the router's logits
    has_bias: bool = False  # added to scores for the choice only (DeepSeek-V3's e_score_correction_bias)
    num_groups: int = 1  # of consecutive experts; a token first chooses groups by the sum of each one's best two
    top_groups: int = 1  # groups that a token's experts may come from
    normalises: bool = False  # whether a token's weights are normalised to sum 1, before `scale`
    scale: float = 1.0  # of all weights
    scales_input: bool = False  # whether a weight multiplies its expert's input instead of its output (Llama 4)


AnyRopeScaling: TypeAlias = "RopeScaling | LinearScaling | YarnScaling | None"


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of multi-head latent attention (arXiv:2405.04434); Hugging Face's names in comments."""

    query_rank: int | None  # q_lora_rank: of the latent that queries come from; None: from the hidden state
    rank: int  # kv_lora_rank: of the latent that keys and values come from
    nope_size: int  # qk_nope_head_dim: of a head's queries and keys, the part without rotation
    rope_size: int  # qk_rope_head_dim: the rotated part; all heads share the key's
    value_size: int  # v_head_dim

    @property
    def head_size(self) -> int:
        """Of queries and keys."""
        return self.nope_size + self.rope_size

    @property
    def latent_size(self) -> int:
        """Of what is cached for a token: the normalised latent and the rotated part of its key."""
        return self.rank + self.rope_size


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
    rope_scaling: AnyRopeScaling
    rms_norm_eps: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    attention_bias: bool  # of all four attention projections
    mlp_bias: bool
    spans: tuple[Span, ...] = ()  # what each layer attends to; empty: full attention in all of them
    soft_cap: float | None = None  # of attention scores
    latent: LatentSizes | None = None
    family: Any = None  # read by the model's own file only: a frozen record that it defines
    heads: HeadLayout | None = None  # of a mesh, where num_heads and num_kv_heads differ from the model's own

    @property
    def layer_spans(self) -> tuple[Span, ...]:
        """Of every layer."""
        return self.spans or (FULL_ATTENTION,) * self.num_layers

    def on_devices(self, num_devices: int) -> ArchitectureConfig:
        """The configuration with the heads of a mesh that splits them over this many devices; `self` with the model's
        own heads where the number divides them."""
        own = self.with_own_heads()
        heads = HeadLayout.of(own.num_heads, own.num_kv_heads, num_devices)
        return own if heads.is_models else replace(own, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, heads=heads)

    def with_own_heads(self) -> ArchitectureConfig:
        """The configuration with the model's own heads."""
        heads = self.heads
        return self if heads is None else replace(self, num_heads=heads.model_heads, num_kv_heads=heads.model_kv_heads, heads=None)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ArchitectureConfig:
        """The sizes that most families store under the same keys of a config.json, of transformers 4 (rope_theta,
        rope_scaling) or 5 (rope_parameters). A model's own `read_config` adds the rest.

        Raises `UnsupportedModelError` naming the field.
        """
        hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        num_kv_heads = integer(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(f"num_key_value_heads is {num_kv_heads}: it must divide num_attention_heads ({num_heads})")
        head_size = integer(config, "head_dim", hidden_size // num_heads)
        if head_size % 2:
            raise UnsupportedModelError(f"head_dim is {head_size}: it must be even, for rotary embeddings")
        rope_theta, rope_scaling = read_rope(config)
        return cls(
            architecture=config["architectures"][0],
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
            max_position_embeddings=integer(config, "max_position_embeddings", 2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a multimodal model's configuration, with the architecture of the whole."""
    found = config.get("text_config")
    if not isinstance(found, Mapping):
        raise UnsupportedModelError(f"text_config is {found!r}: it must be an object")
    return {**found, "architectures": config["architectures"]}


def check_activation(config: Mapping[str, Any], supported: Sequence[str] = ("silu", "swish"), key: str = "hidden_act") -> None:
    """Raise `UnsupportedModelError` for an activation function that a family doesn't support; the first is its
    default."""
    activation = config.get(key, supported[0])
    if activation not in supported:
        raise UnsupportedModelError(f"{key} is {activation!r}: supported are {', '.join(supported)}")


def read_spans(config: Mapping[str, Any], num_layers: int, kinds: Mapping[str, Span], default: Sequence[str]) -> tuple[Span, ...]:
    """The span of each layer, from `layer_types` as transformers writes it, else from `default`."""
    names = config.get("layer_types") or list(default)
    if len(names) != num_layers or any(name not in kinds for name in names):
        raise UnsupportedModelError(f"layer_types is {names!r}: it must be one of {', '.join(kinds)} for each of {num_layers} layers")
    return tuple(kinds[name] for name in names)


def read_rope(
    config: Mapping[str, Any], settings: Mapping[str, Any] | None = None, default_theta: float = 10000.0
) -> tuple[float, AnyRopeScaling]:
    """(rope_theta, scaling). transformers 5 has both in `rope_parameters`. `settings`: read instead of these, for
    models with several."""
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    settings = (config.get(name) or {}) if settings is None else settings
    if not isinstance(settings, Mapping):
        raise UnsupportedModelError(f"{name} is {settings!r}: it must be an object or null")
    theta = positive(settings if "rope_theta" in settings else config, "rope_theta", default_theta)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in _ROPE_SCALINGS:
        raise UnsupportedModelError(f"{name}.rope_type is {kind!r}: supported are {', '.join(_ROPE_SCALINGS)}")
    return theta, _ROPE_SCALINGS[kind](settings, name, config)


def _llama3(settings: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        factor=positive(settings, "factor", None, name),
        low_freq_factor=positive(settings, "low_freq_factor", None, name),
        high_freq_factor=positive(settings, "high_freq_factor", None, name),
        original_context=integer(settings, "original_max_position_embeddings", None, name),
    )


def _linear(settings: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> LinearScaling:
    return LinearScaling(positive(settings, "factor", None, name))


def _yarn(settings: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> YarnScaling:
    def number(key: str) -> float | None:
        return None if settings.get(key) is None else float(settings[key])

    return YarnScaling(
        factor=positive(settings, "factor", None, name),
        original_context=integer(settings, "original_max_position_embeddings", config.get("max_position_embeddings"), name),
        fast_turns=positive(settings, "beta_fast", 32.0, name),
        slow_turns=positive(settings, "beta_slow", 1.0, name),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        attention_factor=number("attention_factor"),
        truncate=bool(settings.get("truncate", True)),
    )


_ROPE_SCALINGS: dict[str, Callable[[Mapping[str, Any], str, Mapping[str, Any]], AnyRopeScaling]] = {
    "default": lambda settings, name, config: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def integer(config: Mapping[str, Any], key: str, default: int | None = None, inside: str = "") -> int:
    """A configuration's field. Raises `UnsupportedModelError` naming it (as part of `inside`) unless it is a positive
    integer."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{inside}{'.' if inside else ''}{key} is {value!r}: it must be a positive integer")
    return value


def count(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A configuration's field that may be 0 or null (0). Raises `UnsupportedModelError` for anything else."""
    value = config.get(key, default)
    return 0 if value in (None, 0) and not isinstance(value, bool) else integer(config, key, default)


def positive(config: Mapping[str, Any], key: str, default: float | None, inside: str = "") -> float:
    """A configuration's positive number. Raises `UnsupportedModelError` for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise UnsupportedModelError(f"{inside}{'.' if inside else ''}{key} is {value!r}: it must be a positive number")
    return float(value)
