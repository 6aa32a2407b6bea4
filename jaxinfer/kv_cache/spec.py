"""How many bytes a KV page takes, which layers share one, and which pages a sequence still needs. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from jaxinfer.models.config import ArchitectureConfig
from pallas_kernels.span import FULL_ATTENTION, Span

# Page 0 belongs to no request: padded rows and padded tokens write there, so that no program needs a mask to write. In a page table it
# stands for a page that is not there: what a window has left behind.
NULL_PAGE = 0

_PAGE_SIZE = 16  # tokens, where nothing else is asked for
_LEAST_PART = 8  # tokens of each page that a device has where they are split: kernels read no fewer

_MOST_GROUPS = 8  # of layers: a page table each, which the host fills in and the device keeps


@dataclass(frozen=True)
class LayerGroups:
    """Layers that attend to the same span of the context, in groups of one size, each with its own page table. So a page of one pool can
    be any group's, whatever the contexts turn out to be, and a group whose span is bounded gives back what it left behind."""

    size: int  # layers of a group; some may have fewer, and leave the last places in its pages unused
    spans: tuple[Span, ...]  # of each group
    places: tuple[tuple[int, int], ...]  # of each of the model's layers: its group, and its place in the group's pages

    @classmethod
    @cache
    def of(cls, spans: tuple[Span, ...]) -> LayerGroups:
        """From the span of each layer. Of all sizes that make few enough groups the one that wastes least, first where contexts have no
        bound, then elsewhere; of equal ones the largest."""
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
            # Dealt out in turn, so that each stage of a pipeline has as many of one group as of another.
            num_groups = -(-len(layers) // size)
            for group in range(num_groups):
                places |= {layer: (len(of_groups), place) for place, layer in enumerate(layers[group::num_groups])}
                of_groups.append(span)
        return cls(size, tuple(of_groups), tuple(places[layer] for layer in range(len(spans))))

    def layers_of(self, group: int) -> list[int]:
        """A group's layers, in the order of their places."""
        return [layer for layer, (of, _) in enumerate(self.places) if of == group]

    def of_stage(self, layers: range) -> LayerGroups:
        """What a stage of a pipeline keeps, in pages of its own under the same numbers: of each group the layers that it has. Places of other
        layers mean nothing there."""
        first = [sum(layer < layers.start for layer in self.layers_of(group)) for group in range(len(self.spans))]
        sizes = [sum(layer in layers for layer in self.layers_of(group)) for group in range(len(self.spans))]
        return LayerGroups(max(sizes), self.spans, tuple((group, place - first[group]) for group, place in self.places))


def default_page_size(config: ArchitectureConfig, num_devices: Iterable[int]) -> int:
    """Tokens a page, for stages of so many devices. Of latents each device gets as many as it would have of pages of its own."""
    return _PAGE_SIZE if config.latent is None else _PAGE_SIZE * math.lcm(*num_devices)


@dataclass(frozen=True)
class PageSpec:
    """A page holds `page_size` tokens' keys and values in the layers of one group. That many tokens, from a multiple of them on, are a
    run: it has a page in each group."""

    num_layers: int  # of a group
    num_kv_heads: int
    head_size: int
    page_size: int  # tokens
    bytes_per_value: int
    spans: tuple[Span, ...] = (FULL_ATTENTION,)  # of the groups
    num_sides: int = 2  # keys and values; 1: latents, which are both
    num_parts: int = 1  # devices that each page's tokens are split over; bytes are those of one

    @classmethod
    def of(cls, config: ArchitectureConfig, page_size: int, bytes_per_value: int) -> PageSpec:
        """Of a model's pages."""
        groups = LayerGroups.of(config.layer_spans)
        if config.latent is not None:
            return cls(groups.size, 1, config.latent.latent_size, page_size, bytes_per_value, groups.spans, num_sides=1)
        return cls(groups.size, config.num_kv_heads, config.head_size, page_size, bytes_per_value, groups.spans)

    def token_parts(self, num_devices: int) -> int:
        """Devices of a mesh that each page's tokens are split over: of latents, which belong to no head, all that get enough of them, or else each
        device has them whole."""
        is_split = self.num_sides == 1 and self.page_size % (_LEAST_PART * num_devices) == 0
        return num_devices if is_split else 1

    def on_device(self, num_devices: int, num_kv_heads: int, num_layers: int) -> PageSpec:
        """What one of a mesh's devices has of each page, whose KV heads may be the mesh's own; of so many of a group's layers."""
        parts, heads = (1, num_kv_heads // num_devices) if self.num_sides == 2 else (self.token_parts(num_devices), 1)
        return replace(self, num_layers=num_layers, num_kv_heads=heads, num_parts=parts)

    def latents_on(self, num_devices: int) -> str | None:
        """How a mesh of so many devices has latents, such as "shared out over 8 devices, in pages of 128 tokens"; None without any, or on one."""
        if self.num_sides == 2 or num_devices == 1:
            return None
        if self.token_parts(num_devices) == 1:
            return f"whole on each of {num_devices} devices: {self.page_size} tokens a page are less than {_LEAST_PART} for each, or don't divide"
        return f"shared out over {num_devices} devices, in pages of {self.page_size} tokens"

    @property
    def part_size(self) -> int:
        """Tokens of a page that a device has."""
        return self.page_size // self.num_parts

    @property
    def num_groups(self) -> int:
        return len(self.spans)

    @cached_property
    def is_bounded(self) -> tuple[bool, ...]:
        """Of each group: whether a sequence gives pages back as it goes on."""
        return tuple(span.size is not None for span in self.spans)

    @property
    def page_bytes(self) -> int:
        return self.num_sides * self.num_layers * self.num_kv_heads * self.head_size * self.part_size * self.bytes_per_value

    @property
    def token_bytes(self) -> int:
        """Of a token that every layer attends to."""
        return self.num_groups * self.page_bytes // self.page_size

    @property
    def lasting_token_bytes(self) -> int:
        """Of a token that only layers without a bound attend to any more: what a long context costs for each of its tokens."""
        return self.is_bounded.count(False) * self.page_bytes // self.page_size

    def blocks_for(self, num_tokens: int) -> int:
        """Runs that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def first_run(self, group: int, num_tokens: int) -> int:
        """The first run that a group's layers attend to from the token after so many on."""
        return self.spans[group].first(num_tokens) // self.page_size

    def max_blocks(self, group: int, num_tokens: int) -> int | None:
        """The most runs of a group that a chunk of so many tokens attends to, itself included; None where there is no bound."""
        size = self.spans[group].size
        return None if size is None else (size + num_tokens - 3) // self.page_size + 2

    def max_pages(self, num_tokens: int, chunk_size: int) -> int:
        """The most pages that a sequence of so many tokens holds, computed in chunks of at most `chunk_size`."""
        runs = self.blocks_for(num_tokens)
        bounds = (self.max_blocks(group, chunk_size) for group in range(self.num_groups))
        return sum(runs if bound is None else min(runs, bound) for bound in bounds)

    def num_pages(self, budget: int) -> int:
        """Pages of a pool of `budget` bytes, the null page included. Raises `ValueError` if not a run's are left for a request."""
        count, least = budget // self.page_bytes, self.num_groups + 1
        if count < least:
            needs = f"a page of {self.page_size} tokens takes {self.page_bytes} bytes"
            if self.num_groups > 1:
                needs += f", a token needs {self.num_groups} of them"
            raise ValueError(
                f"kv_memory of {budget} bytes holds no KV page: {needs} and one is kept aside; give at least "
                f"{least * self.page_bytes} bytes, or a smaller page_size"
            )
        return count
