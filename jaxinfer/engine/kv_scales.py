"""Scales of float8 keys and values by layer, side and KV head: the checkpoint's, or found by prefill of a text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from checkpoints.source import TensorSource
from jaxinfer.architecture.head_layout import HeadLayout
from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.kv_cache.pages import Pages
from jaxinfer.kv_cache.spec import NULL_PAGE, LayerGroups
from jaxinfer.pipeline.stage import Stage
from jaxinfer.prefill.batch import PrefillBatch, empty_batch
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.programs.buckets import prefill_rows
from jaxinfer.programs.compilation import COUNTER
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.weights.kv_scales import rounded_up, stored_kv_scales
from jaxinfer.weights.template import ModelTemplate
from pallas_kernels.float8_pages import LARGEST, widened
from sharding.partition import place

# Other texts have larger values. Room for them costs no precision, only some of the smallest values, which become 0.
_HEADROOM = 4
_MOST_TOKENS = 256
_MOST_STEPS = 8
_LEAST, _LESS = 2.0**-4, 2.0**-8  # smaller values have fewer bits; of those that became 0, how much smaller they may be
_TEXT = """The lighthouse keeper wrote in her diary every evening: the wind's direction, 3 ships that had passed, \
the price of oil (12.50 a barrel!), and what the gulls were up to. "Nothing happened today," she began on 4 March 1911, \
and then filled two pages. def tide(hour): return 2.1 * math.sin(hour / 12.4) — her nephew, who studied mathematics in \
Göttingen, had explained why. Although she did not believe in formulas, she kept his letters in a tin box, next to the \
matches; one of them ended with a question that she never answered. What would you do, he asked, if the light went out?"""


class CalibratedScales:
    """Sets the scales of all pools: at the start, and again after the weights were replaced. Belongs to the engine's
    thread."""

    def __init__(
        self,
        template: ModelTemplate,
        tokenizer: Tokenizer,
        prefill: PrefillRunner,
        prefill_stages: Sequence[Stage],
        decode_stages: Sequence[Stage],
        tell: Callable[[str], None],
    ) -> None:
        """`tell`: is given what the scales are, in words that differ where scales do."""
        assert isinstance(template.config, ArchitectureConfig)
        self._weight_map, self._config = template.model.weight_map, template.config
        self._prefill, self._prefill_stages, self._decode_stages, self._tell = prefill, prefill_stages, decode_stages, tell
        self._text = tokenizer.encode(_TEXT)

    def set(self, source: TensorSource | None) -> None:
        """The checkpoint's, or else those of a text by the weights that are loaded, which overwrites the first pages.
        `source`: of the weights; None: they are random. Raises `CheckpointError` for a checkpoint's that can't be
        used."""
        scales, origin = None if source is None else stored_kv_scales(source, self._weight_map, self._config), "the checkpoint's"
        with COUNTER.compiling():
            if scales is None:
                scales, origin = self._find(), "found at the start"
            self._put(scales)
        self._tell(f"float8_e4m3fn, scales {origin} ({hashlib.sha256(scales.tobytes()).hexdigest()[:8]})")

    def _find(self) -> Float[np.ndarray, "L S K"]:
        """Steps until float8 has each head's largest value with all its bits, and has larger ones."""
        spec = self._prefill_stages[0].pool.spec
        scales = np.ones((self._config.num_layers, spec.num_sides, spec.num_kv_heads), np.float32)
        batch, pages = self._batch()
        for _ in range(_MOST_STEPS):
            self._put(scales)
            self._prefill.run(batch)
            largest = self._largest(pages)
            seen = largest > 0
            scales = np.where(seen, rounded_up(largest * scales * (_HEADROOM / LARGEST)), scales * _LESS).astype(np.float32)
            if np.all((largest >= _LEAST) & (largest < LARGEST)):
                break
        return np.where(seen, scales, 1).astype(np.float32)

    def _batch(self) -> tuple[PrefillBatch, Int[np.ndarray, "W C"]]:
        """A step of as much of the text as fits, and its pages: by token block and group, from the first on."""
        spec, prefill = self._prefill_stages[0].pool.spec, self._prefill
        size = next((size for size in prefill.buckets if size >= _MOST_TOKENS), prefill.buckets[-1])
        blocks = (self._prefill_stages[0].pool.abstract.shape[2] - 1) // spec.num_groups
        length = min(size, len(self._text), prefill.max_model_len, blocks * spec.page_size)
        batch = empty_batch(size, prefill_rows(size), prefill.table_width)
        pages = NULL_PAGE + 1 + np.arange(spec.blocks_for(length) * spec.num_groups, dtype=np.int32)
        packed = batch.packed
        packed.token_ids[:length], packed.page_table[0, : pages.size] = self._text[:length], pages
        packed.query_len[0] = packed.kv_len[0] = length
        return batch, pages.reshape(-1, spec.num_groups)

    def _largest(self, pages: Int[np.ndarray, "W C"]) -> Float[np.ndarray, "L S K"]:
        """The largest stored value by layer, side and the model's KV head."""
        found = []
        for stage in self._prefill_stages:
            of_groups = [np.asarray(_largest(stage.pool.array, ids)) for ids in np.ascontiguousarray(pages.T)]
            groups = LayerGroups.of(self._config.layer_spans).of_stage(stage.template.layers)
            on_mesh = np.stack([of_groups[group][place] for group, place in map(groups.places.__getitem__, stage.template.layers)])
            found.append(_of_model(on_mesh, stage.pool.heads))
        return np.concatenate(found)

    def _put(self, scales: Float[np.ndarray, "L S K"]) -> None:
        for stage in (*self._prefill_stages, *self._decode_stages):
            pool, layers = stage.pool, stage.template.layers
            assert pool.abstract_scales is not None
            of_stage = scales[layers.start : layers.stop]
            if pool.heads is not None:
                # Heads of zeros need none: theirs is the last.
                zero_heads = np.concatenate([of_stage, np.ones_like(of_stage[..., :1])], axis=-1)
                of_stage = zero_heads[..., [-1 if head is None else head for head in pool.heads.kv_heads]]
            pool.scales = place(np.ascontiguousarray(of_stage), pool.abstract_scales.sharding)


@jax.jit
def _largest(pages: Pages, page_ids: Int[Array, " W"]) -> Float[Array, "L S K"]:
    return jnp.abs(widened(pages[:, :, page_ids])).max(axis=(2, 4, 5))


def _of_model(on_mesh: Float[np.ndarray, "L S K"], heads: HeadLayout | None) -> Float[np.ndarray, "L S K"]:
    """Of the model's own KV heads, of which a mesh may have copies."""
    if heads is None:
        return on_mesh
    found = np.zeros((*on_mesh.shape[:2], heads.model_kv_heads), np.float32)
    for place_on_mesh, head in enumerate(heads.kv_heads):
        if head is not None:
            found[..., head] = np.maximum(found[..., head], on_mesh[..., place_on_mesh])
    return found
