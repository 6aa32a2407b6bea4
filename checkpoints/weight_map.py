"""Which tensors of a checkpoint fill which parameter of a model: a table each model file declares."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from checkpoints.source import CheckpointError

# Buffers that old checkpoints hold though they are computed, not learned.
_COMPUTED = ("*.rotary_emb.inv_freq", "*.attn.masked_bias", "*.attn.bias")


@dataclass(frozen=True, slots=True)
class Weight:
    """The checkpoint tensors that fill a parameter, side by side along one of its axes, and whether their dimensions are reversed on the way.

    A tensor's shape (reversed where `transpose`), any of whose dimensions may be split, is that of its part: a tensor [N*H, D]
    transposed fills [D, N*H] or [D, N, H]; two of [F, D] transposed and joined along axis -2 fill [D, 2, F].
    """

    tensors: tuple[str, ...]
    transpose: bool = False
    axis: int = 0  # of the parameter, along which several tensors lie; each takes as much of it as its size calls for


@dataclass(frozen=True)
class WeightMap:
    """`weights`: parameter path -> Weight, with "{layer}" for the layer's number on both sides, such as
    "layers.{layer}.attention.out.kernel": Weight(("model.layers.{layer}.self_attn.o_proj.weight",), transpose=True).
    `ignored`: shell patterns of tensors that may be in a checkpoint though no parameter takes them."""

    weights: Mapping[str, Weight]
    ignored: tuple[str, ...] = ()

    def find(self, path: str) -> Weight:
        """The checkpoint tensors of a parameter such as "layers.3.attention.out.kernel"; `CheckpointError` if the table has none."""
        if path in self.weights:
            return self.weights[path]
        number = re.search(r"(?<=\.)\d+(?=\.)", path)
        pattern = f"{path[: number.start()]}{{layer}}{path[number.end() :]}" if number else path
        if number is None or pattern not in self.weights:
            raise CheckpointError(f"parameter {path!r} has no entry in the model's weight map: add it there")
        found = self.weights[pattern]
        return replace(found, tensors=tuple(name.replace("{layer}", number.group()) for name in found.tensors))

    def with_stack(self, name: str, paths: Sequence[str]) -> WeightMap:
        """With one more entry: parameters of one shape, each of one tensor, stacked along a new first axis."""
        found = [self.find(path) for path in paths]
        assert all(len(weight.tensors) == 1 and not weight.transpose for weight in found), paths
        return replace(self, weights={**self.weights, name: Weight(tuple(weight.tensors[0] for weight in found))})

    def is_ignored(self, tensor: str) -> bool:
        """Whether this tensor may be left over."""
        return any(fnmatch.fnmatchcase(tensor, pattern) for pattern in (*_COMPUTED, *self.ignored))
