"""The sizes that are measured: Llama-3.1-8B's on a GPU, and tiny ones that show on a CPU that everything runs. Imports
no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import roofline
from benchmarks.gpu.roofline import RooflineWork

DECODE, PREFILL = "decode step", "prefill step"  # of a whole model, in any engine


@dataclass(frozen=True)
class ModelSizes:
    """A Llama model's."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int

    def hf_config(self, max_tokens: int) -> dict[str, Any]:
        """As a config.json has it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.mlp_size,
            "vocab_size": self.vocab_size,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": max_tokens,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }

    @property
    def layer_weights(self) -> int:
        """Numbers in a layer's matrices."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.mlp_size

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size


@dataclass(frozen=True)
class BenchmarkSizes:
    model: ModelSizes
    itemsize: int  # bytes of a number: weights, keys, values, activations
    dtype: str
    page_size: int
    decode: tuple[tuple[int, int], ...]  # batch and context
    short: tuple[int, ...]  # contexts of one request alone, around a page and a tile: for attention, not for steps
    prefill: tuple[int, ...]  # tokens of a prompt
    grouped: tuple[int, ...]  # tokens of a step with mixture-of-experts layers
    copied_bytes: int
    matrix_size: int
    cache_bytes: int  # interleaved inputs together exceed this
    kernel_ways: tuple[str, ...]  # backends, the best first
    repeats: int
    is_small: bool

    def decode_attention(self, batch: int, context: int) -> RooflineWork:
        m = self.model
        return roofline.decode_attention(batch, context, m.num_heads, m.num_kv_heads, m.head_size, self.itemsize)

    def prefill_attention(self, num_tokens: int, num_cached: int = 0) -> RooflineWork:
        m = self.model
        return roofline.prefill_attention(num_tokens, m.num_heads, m.num_kv_heads, m.head_size, self.itemsize, num_cached)

    def decode_step(self, batch: int, context: int) -> RooflineWork:
        """All layers and the head: weights, keys and values; activations between layers stay in the cache."""
        weights = self.model.num_layers * self.model.layer_weights + self.model.head_weights
        attention = self.decode_attention(batch, context).times(self.model.num_layers)
        return RooflineWork(weights * self.itemsize, 2 * batch * weights) + attention

    def prefill_step(self, num_tokens: int) -> RooflineWork:
        """The head is for the last token alone."""
        layers = self.model.num_layers * self.model.layer_weights
        attention = self.prefill_attention(num_tokens).times(self.model.num_layers)
        weights = layers + self.model.head_weights
        return RooflineWork(weights * self.itemsize, 2 * num_tokens * layers + 2 * self.model.head_weights) + attention


LLAMA_8B = ModelSizes(32, 4096, 32, 8, 128, 14336, 128256)

FULL = BenchmarkSizes(
    model=LLAMA_8B,
    itemsize=2,
    dtype="bfloat16",
    page_size=16,
    decode=tuple((batch, context) for context in (512, 4096) for batch in (1, 8, 32, 128)),
    short=(1, 17, 100),
    prefill=(512, 2048, 8192),
    grouped=(64, 4096),
    copied_bytes=2**31,
    matrix_size=8192,
    cache_bytes=200 * 2**20,  # an H200 has 60 MB of L2
    kernel_ways=("mosaic_gpu", "xla"),
    repeats=9,
    is_small=False,
)

SMALL = BenchmarkSizes(
    model=ModelSizes(1, 64, 4, 2, 16, 96, 256),
    itemsize=4,
    dtype="float32",
    page_size=8,
    decode=((1, 16), (4, 24)),
    short=(3,),
    prefill=(64,),
    grouped=(8,),
    copied_bytes=2**16,
    matrix_size=64,
    cache_bytes=2**14,
    kernel_ways=("xla", "reference"),
    repeats=2,
    is_small=True,
)
