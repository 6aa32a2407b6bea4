"""Which tensor of a checkpoint fills which parameter of a model: a table each model file declares."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

from checkpoints.source import CheckpointError

# Buffers that old checkpoints hold though they are computed, not learned.
_COMPUTED = ("*.rotary_emb.inv_freq", "*.attn.masked_bias", "*.attn.bias")


@dataclass(frozen=True, slots=True)
class Weight:
    """A checkpoint tensor's name, and whether its dimensions are reversed on the way.

    The parameter's shape is the tensor's (reversed where `transpose`), any of whose dimensions may be split: a tensor [N*H, D]
    transposed fills a parameter [D, N*H] or [D, N, H].
    """

    tensor: str
    transpose: bool = False


@dataclass(frozen=True)
class WeightMap:
    """`weights`: parameter path -> Weight, with "{layer}" for the layer's number on both sides, such as
    "layers.{layer}.attention.q.kernel": Weight("model.layers.{layer}.self_attn.q_proj.weight", transpose=True).
    `ignored`: shell patterns of tensors that may be in a checkpoint though no parameter takes them."""

    weights: Mapping[str, Weight]
    ignored: tuple[str, ...] = ()

    def find(self, path: str) -> Weight:
        """The checkpoint tensor of a parameter such as "layers.3.attention.q.kernel"; `CheckpointError` if the table has none."""
        if path in self.weights:
            return self.weights[path]
        number = re.search(r"(?<=\.)\d+(?=\.)", path)
        pattern = f"{path[: number.start()]}{{layer}}{path[number.end() :]}" if number else path
        if number is None or pattern not in self.weights:
            raise CheckpointError(f"parameter {path!r} has no entry in the model's weight map: add it there")
        found = self.weights[pattern]
        return Weight(found.tensor.replace("{layer}", number.group()), found.transpose)

    def is_ignored(self, tensor: str) -> bool:
        """Whether this tensor may be left over."""
        return any(fnmatch.fnmatchcase(tensor, pattern) for pattern in (*_COMPUTED, *self.ignored))
