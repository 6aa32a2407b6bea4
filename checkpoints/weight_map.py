"""Which tensors of a checkpoint fill which parameter of a model: a table each model file declares."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from checkpoints.source import CheckpointError

# Buffers in old checkpoints that are computed, not learned.
_COMPUTED = ("*.rotary_emb.inv_freq", "*.attn.masked_bias", "*.attn.bias")
# Of keys and values in float8, which are read where pages are (`jaxinfer.weights.kv_scales`); of other tools' queries.
_SCALES = ("*.self_attn.[kvq]_scale", "*.self_attn.[kvq]_proj.[kvq]_scale", "*.self_attn.prob_scale")


_EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class Weight:
    """The checkpoint tensors that fill a parameter, side by side along one of its axes, and whether their dimensions
    are reversed on the way.

    A tensor's shape (reversed where `transpose`), any of whose dimensions may be split, is that of its part. A tensor
    [N*H, D] transposed fills [D, N*H] or [D, N, H]; two of [F, D] transposed and joined along axis -2 fill [D, 2, F];
    one of [E, D, 2*F] fills [E, D, 2, F]. With "{expert}" in the names the parameter's first axis counts experts, each
    filled from the tensors of its number: [E, D, 2, F] from two of [F, D] for every expert.
    """

    tensors: tuple[str, ...]
    transpose: bool = False
    axis: int = 0  # axis of the parameter along which several tensors lie; each fills as much of it as it has elements
    is_stack: bool = False  # each tensor fills one index of the parameter's first axis
    part: str | None = None  # stored part of the tensors, such as "weight_packed", that fills the parameter unchanged

    @property
    def is_of_experts(self) -> bool:
        return any(_EXPERT in name for name in self.tensors)

    def of_expert(self, expert: int, num_dims: int) -> Weight:
        """The weight that fills one expert's part of a parameter with `ndim` dimensions."""
        tensors = tuple(name.replace(_EXPERT, str(expert)) for name in self.tensors)
        return replace(self, tensors=tensors, axis=self.axis % num_dims - 1 if len(tensors) > 1 else 0)


@dataclass(frozen=True)
class WeightMap:
    """`weights`: parameter path -> Weight, with "{layer}" for the layer's number on both sides, such as
    "layers.{layer}.attention.out.kernel": Weight(("model.layers.{layer}.self_attn.o_proj.weight",), transpose=True).
    `ignored`: shell patterns of tensors that may be in a checkpoint though no parameter uses them. `renamed`: prefixes
    of tensors' names in a checkpoint, and their replacements here, such as ("language_model.model.", "model.") for the
    text model within a multimodal one; the first that fits counts. All names in `weights` and `ignored` are renamed
    ones. `optional`: counts in config.json of parts that a checkpoint may lack all the same, each with a pattern of
    names, as they are there, of which it then has none. `unread`: modules, by the first names of their parameters'
    paths, that no program reads. A checkpoint has them, and they are checked, but no device holds them."""

    weights: Mapping[str, Weight]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    optional: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def find(self, path: str) -> Weight:
        """The checkpoint tensors of a parameter such as "layers.3.attention.out.kernel"; `CheckpointError` if the table
        has none."""
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
        return replace(self, weights={**self.weights, name: Weight(tuple(weight.tensors[0] for weight in found), is_stack=True)})

    def names_in(self, checkpoint: Sequence[str]) -> dict[str, str]:
        """The checkpoint's tensors by their names here. Raises `CheckpointError` for two with the same name."""
        names: dict[str, str] = {}
        for theirs in checkpoint:
            if (ours := self._renamed(theirs)) in names:
                raise CheckpointError(f"tensors {names[ours]!r} and {theirs!r} are both {ours!r} of this model: fetch the checkpoint again")
            names[ours] = theirs
        return names

    def names_of_missing(self, ours: Iterable[str], checkpoint: Sequence[str]) -> list[str]:
        """The names in the checkpoint that missing tensors would have, inferred from the others."""
        used = [(theirs, begin) for theirs, begin in self.renamed if any(name.startswith(theirs) for name in checkpoint)]
        return [next((theirs + name.removeprefix(begin) for theirs, begin in used if name.startswith(begin)), name) for name in ours]

    def is_ignored(self, tensor: str) -> bool:
        """Whether this tensor, by its name here, may be left over."""
        return any(fnmatch.fnmatchcase(tensor, pattern) for pattern in (*_COMPUTED, *_SCALES, *self.ignored))

    def _renamed(self, tensor: str) -> str:
        for theirs, ours in self.renamed:
            if tensor.startswith(theirs):
                return ours + tensor.removeprefix(theirs)
        return tensor
