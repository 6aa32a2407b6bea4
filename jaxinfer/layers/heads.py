"""Attention heads on a mesh whose number of devices doesn't divide the model's KV heads. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Which heads a mesh has. Each of the model's KV heads is there `copies` times, one after the other, and each copy serves its share of that
    head's query heads, in turn, the last of them filled up with query heads of zeros; after all of those come KV heads of zeros. So every device has
    as many KV heads, each with the query heads that attend to it. What a head of zeros attends to is multiplied by zeros: results are exact."""

    model_heads: int  # query heads
    model_kv_heads: int
    num_devices: int  # that heads are split over
    copies: int  # of each KV head

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, num_devices: int) -> HeadLayout:
        """A model's heads on so many devices. First as few KV heads a device as there can be, which every token of a context costs memory and every
        step reads; then as few query heads a device, which cost weights and arithmetic; then as few copies. Where the devices divide the KV heads
        these are the model's own."""
        assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
        group = num_heads // num_kv_heads
        room = num_devices * -(-num_kv_heads // num_devices)  # KV heads on the mesh, at least
        group_of_copy = -(-group // (room // num_kv_heads))
        return cls(num_heads, num_kv_heads, num_devices, -(-group // group_of_copy))

    @property
    def num_kv_heads(self) -> int:
        """On the mesh."""
        return self.num_devices * -(-self.model_kv_heads * self.copies // self.num_devices)

    @property
    def group(self) -> int:
        """Query heads of a KV head on the mesh."""
        return -(-self.model_heads // self.model_kv_heads // self.copies)

    @property
    def num_heads(self) -> int:
        """On the mesh."""
        return self.num_kv_heads * self.group

    @property
    def is_models(self) -> bool:
        """Whether they are the model's own heads: nothing is copied, nothing filled up."""
        return self.num_kv_heads == self.model_kv_heads

    @property
    def spread_axes(self) -> frozenset[str]:
        """Logical axes of weights that are not as the model has them."""
        found = {"kv_heads"} if self.num_kv_heads != self.model_kv_heads else set()
        return frozenset(found | ({"heads"} if self.num_heads != self.model_heads else set()))

    @property
    def kv_heads(self) -> tuple[int | None, ...]:
        """Of each KV head on the mesh, which of the model's it is; None: zeros."""
        return tuple(head // self.copies if head < self.copies * self.model_kv_heads else None for head in range(self.num_kv_heads))

    @property
    def query_heads(self) -> tuple[int | None, ...]:
        """The same of each query head."""
        of_model = self.model_heads // self.model_kv_heads
        found: list[int | None] = []
        for place, kv_head in enumerate(self.kv_heads):
            first = place % self.copies * self.group
            of_copy = range(first, first + self.group)
            found += [kv_head * of_model + head if kv_head is not None and head < of_model else None for head in of_copy]
        return tuple(found)

    @property
    def projections(self) -> tuple[int | None, ...]:
        """The same of each KV head's queries, key and value on the mesh, all in one row as are the model's."""
        of_model = self.model_heads // self.model_kv_heads
        found: list[int | None] = []
        for place, kv_head in enumerate(self.kv_heads):
            queries = self.query_heads[place * self.group : (place + 1) * self.group]
            # A query head of the model comes after the keys and values of all KV heads before its own.
            found += [None if head is None else head + 2 * (head // of_model) for head in queries]
            found += [None if kv_head is None else kv_head * (of_model + 2) + of_model + side for side in range(2)]
        return tuple(found)

    def cost(self, *, has_latents: bool = False) -> str:
        """What it costs, such as "KV heads 3 -> 4 over 2 devices: 33% more KV, 33% more attention weights". With latents, which belong to no head, a
        page has no heads."""
        more_weights = (self.num_heads + self.num_kv_heads) / (self.model_heads + self.model_kv_heads) - 1
        if has_latents:
            return f"heads {self.model_heads} -> {self.num_heads} over {self.num_devices} devices: {more_weights:.0%} more weights of heads"
        copied = f", {self.copies} copies of each," if self.copies > 1 else ""
        more_kv = self.num_kv_heads / self.model_kv_heads - 1
        return (
            f"KV heads {self.model_kv_heads} -> {self.num_kv_heads}{copied} over {self.num_devices} devices: "
            f"{more_kv:.0%} more KV, {more_weights:.0%} more attention weights"
        )
