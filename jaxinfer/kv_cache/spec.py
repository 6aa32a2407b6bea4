"""PageSpec and LayerGroups: bytes of a KV page, which layers share one, which pages a sequence needs. Imports no
JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from jaxinfer.architecture.model_config import ArchitectureConfig
from pallas_kernels.span import FULL_ATTENTION, Span

# Page 0 belongs to no request: padding rows and tokens write there, so that no program needs a mask. In a page table it
# stands for an absent page, such as one outside a window.
NULL_PAGE = 0

FLOAT8_BYTES = 1  # of a value; no other type has as few

_PAGE_SIZE = 16  # tokens, by default
_LEAST_PART = 8  # the fewest tokens of a page on a device, where tokens are split: kernels read no fewer

_MOST_GROUPS = 8  # of layers: each has a page table, which the host fills and the device stores


@dataclass(frozen=True)
class LayerGroups:
    """Groups of layers with the same span, all of one size, each with its own page table. So any page of the pool
    serves any group, whatever the mix of contexts, and a group with a bounded span releases pages outside it."""

    size: int  # layers of a group; some groups have fewer, and leave the rest of their pages unused
    spans: tuple[Span, ...]  # one a group
    places: tuple[tuple[int, int], ...]  # for each of the model's layers: its group, and its index in the group's pages

    @classmethod
    @cache
    def of(cls, spans: tuple[Span, ...]) -> LayerGroups:
        """From the span of each layer. Among sizes with few enough groups, the one that wastes least, first in groups
        with full attention, then in others; of equal ones the largest."""
        kinds: dict[Span, list[int]] = {}
        for layer, span in enumerate(spans):
            kinds.setdefault(span, []).append(layer)

        def waste(size: int) -> tuple[int, int, int]:
            unused = {span: -len(layers) % size for span, layers in kinds.items()}
            return unused.get(FULL_ATTENTION, 0), sum(unused.values()), -size

        most_groups = max(_MOST_GROUPS, len(kinds))
        sizes = range(1, max(map(len, kinds.values())) + 1)
        size = min((n for n in sizes if sum(-(-len(layers) // n) for layers in kinds.values()) <= most_groups), key=waste)
        places: dict[int, tuple[int, int]] = {}
        of_groups: list[Span] = []
        for span, layers in kinds.items():
            # Round-robin, so that each pipeline stage has layers of all groups equally.
            num_groups = -(-len(layers) // size)
            for group in range(num_groups):
                places |= {layer: (len(of_groups), place) for place, layer in enumerate(layers[group::num_groups])}
                of_groups.append(span)
        return cls(size, tuple(of_groups), tuple(places[layer] for layer in range(len(spans))))

    def layers_of(self, group: int) -> list[int]:
        """A group's layers, in the order of their indices."""
        return [layer for layer, (of, _) in enumerate(self.places) if of == group]

    def of_stage(self, layers: range) -> LayerGroups:
        """The groups of a pipeline stage, whose pages have the same numbers but only its own layers. Indices of other
        layers are meaningless."""
        first = [sum(layer < layers.start for layer in self.layers_of(group)) for group in range(len(self.spans))]
        sizes = [sum(layer in layers for layer in self.layers_of(group)) for group in range(len(self.spans))]
        return LayerGroups(max(sizes), self.spans, tuple((group, place - first[group]) for group, place in self.places))


def default_page_size(config: ArchitectureConfig, num_devices: Iterable[int]) -> int:
    """Tokens a page for stages of these sizes. With latents, each device gets as many as in a page of its own."""
    return _PAGE_SIZE if config.latent is None else _PAGE_SIZE * math.lcm(*num_devices)


@dataclass(frozen=True)
class PageSpec:
    """A page has the keys and values of `page_size` tokens in the layers of one group. A token block is `page_size`
    tokens from a multiple of that on; it has a page in each group."""

    num_layers: int  # in a group
    num_kv_heads: int
    head_size: int
    page_size: int  # tokens
    bytes_per_value: int
    spans: tuple[Span, ...] = (FULL_ATTENTION,)  # one a group
    num_sides: int = 2  # keys and values; 1: latents, which serve as both
    num_parts: int = 1  # devices over which each page's tokens are split; bytes are of one device

    @classmethod
    def of(cls, config: ArchitectureConfig, page_size: int, bytes_per_value: int) -> PageSpec:
        """The spec of a model's pages."""
        groups = LayerGroups.of(config.layer_spans)
        if config.latent is not None:
            return cls(groups.size, 1, config.latent.latent_size, page_size, bytes_per_value, groups.spans, num_sides=1)
        return cls(groups.size, config.num_kv_heads, config.head_size, page_size, bytes_per_value, groups.spans)

    def token_parts(self, num_devices: int) -> int:
        """The number of devices over which each page's tokens are split: for latents, which belong to no head, all of a
        mesh if each gets enough; otherwise 1, and each device has whole pages."""
        is_split = self.num_sides == 1 and self.page_size % (_LEAST_PART * num_devices) == 0
        return num_devices if is_split else 1

    def on_device(self, num_devices: int, num_kv_heads: int, num_layers: int) -> PageSpec:
        """The part of each page on one of a mesh's devices, with the mesh's KV heads and a group's layers on the
        mesh."""
        parts, heads = (1, num_kv_heads // num_devices) if self.num_sides == 2 else (self.token_parts(num_devices), 1)
        return replace(self, num_layers=num_layers, num_kv_heads=heads, num_parts=parts)

    def latents_on(self, num_devices: int) -> str | None:
        """How a mesh has latents, such as "shared out over 8 devices, in pages of 128 tokens"; None without latents, or
        on one device."""
        if self.num_sides == 2 or num_devices == 1:
            return None
        if self.token_parts(num_devices) == 1:
            return f"whole on each of {num_devices} devices: {self.page_size} tokens a page are less than {_LEAST_PART} for each, or don't divide"
        return f"shared out over {num_devices} devices, in pages of {self.page_size} tokens"

    @property
    def part_size(self) -> int:
        """Tokens of a page on one device."""
        return self.page_size // self.num_parts

    @property
    def is_float8(self) -> bool:
        """Whether values are float8_e4m3fn, scaled by KV head."""
        return self.bytes_per_value == FLOAT8_BYTES

    @property
    def num_groups(self) -> int:
        return len(self.spans)

    @cached_property
    def is_bounded(self) -> tuple[bool, ...]:
        """For each group, whether a sequence releases pages as it grows."""
        return tuple(span.size is not None for span in self.spans)

    @property
    def page_bytes(self) -> int:
        return self.num_sides * self.num_layers * self.num_kv_heads * self.head_size * self.part_size * self.bytes_per_value

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return self.num_groups * self.page_bytes // self.page_size

    @property
    def lasting_token_bytes(self) -> int:
        """Bytes of a token in layers with full attention: what each token of a long context costs."""
        return self.is_bounded.count(False) * self.page_bytes // self.page_size

    def blocks_for(self, num_tokens: int) -> int:
        """Token blocks for this many tokens."""
        return -(-num_tokens // self.page_size)

    def first_run(self, group: int, num_tokens: int) -> int:
        """The first token block that a group's layers attend to, for tokens after the first `num_tokens`."""
        return self.spans[group].first(num_tokens) // self.page_size

    def max_blocks(self, group: int, num_tokens: int) -> int | None:
        """The most token blocks of a group that a chunk of `num_tokens` attends to, itself included; None if
        unbounded."""
        size = self.spans[group].size
        return None if size is None else (size + num_tokens - 3) // self.page_size + 2

    def max_pages(self, num_tokens: int, chunk_size: int) -> int:
        """The most pages of a sequence of `num_tokens`, prefilled in chunks of at most `chunk_size`."""
        runs = self.blocks_for(num_tokens)
        bounds = (self.max_blocks(group, chunk_size) for group in range(self.num_groups))
        return sum(runs if bound is None else min(runs, bound) for bound in bounds)

    def num_pages(self, budget: int) -> int:
        """Pages in `budget` bytes, the null page included. Raises `ValueError` as `check_room` does."""
        self.check_room(budget)
        return budget // self.page_bytes

    def check_room(self, budget: int) -> None:
        """Raise `ValueError` if `budget` bytes don't hold a single token block."""
        least = self.num_groups + 1
        if budget // self.page_bytes < least:
            needs = f"a page of {self.page_size} tokens takes {self.page_bytes} bytes"
            if self.num_groups > 1:
                needs += f", a token needs {self.num_groups} of them"
            raise ValueError(
                f"kv_memory of {budget} bytes holds no KV page: {needs} and one is kept aside; give at least "
                f"{least * self.page_bytes} bytes, or a smaller page_size"
            )
