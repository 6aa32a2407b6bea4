"""Attention heads on a mesh whose number of devices doesn't divide the model's KV heads. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Which query and KV heads a mesh has. Each KV head of the model is there `copies` times, in adjacent positions.
    Each copy serves its share of that head's query heads; the last copy is padded with query heads of zeros. KV heads
    of zeros come last. So every device has as many KV heads, each with the query heads that attend to it. The output
    of a zero head is multiplied by zeros: results are exact."""

    model_heads: int  # query heads
    model_kv_heads: int
    num_devices: int  # over which heads are split
    copies: int  # of each KV head

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, num_devices: int) -> HeadLayout:
        """The heads of a model over this many devices. In order of importance: fewest KV heads a device, which cost
        memory for every cached token and are read in every step; fewest query heads a device, which cost weights and
        arithmetic; fewest copies. Where the number of devices divides the KV heads, the layout is the model's own."""
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
        """Whether these are the model's own heads: none is copied, none padded."""
        return self.num_kv_heads == self.model_kv_heads

    @property
    def spread_axes(self) -> frozenset[str]:
        """Logical axes along which weights differ from the model's."""
        found = {"kv_heads"} if self.num_kv_heads != self.model_kv_heads else set()
        return frozenset(found | ({"heads"} if self.num_heads != self.model_heads else set()))

    @property
    def kv_heads(self) -> tuple[int | None, ...]:
        """For each KV head on the mesh, its index in the model; None for a head of zeros."""
        return tuple(head // self.copies if head < self.copies * self.model_kv_heads else None for head in range(self.num_kv_heads))

    @property
    def query_heads(self) -> tuple[int | None, ...]:
        """For each query head on the mesh, its index in the model; None for a head of zeros."""
        of_model = self.model_heads // self.model_kv_heads
        found: list[int | None] = []
        for place, kv_head in enumerate(self.kv_heads):
            first = place % self.copies * self.group
            of_copy = range(first, first + self.group)
            found += [kv_head * of_model + head if kv_head is not None and head < of_model else None for head in of_copy]
        return tuple(found)

    @property
    def projections(self) -> tuple[int | None, ...]:
        """For each head of the fused QKV projection on the mesh (per KV head: its queries, key, value), its index in
        the model's; None for zeros."""
        of_model = self.model_heads // self.model_kv_heads
        found: list[int | None] = []
        for place, kv_head in enumerate(self.kv_heads):
            queries = self.query_heads[place * self.group : (place + 1) * self.group]
            # In the model, keys and values of all earlier KV heads come before a query head.
            found += [None if head is None else head + 2 * (head // of_model) for head in queries]
            found += [None if kv_head is None else kv_head * (of_model + 2) + of_model + side for side in range(2)]
        return tuple(found)

    def cost(self, *, has_latents: bool = False) -> str:
        """The cost in memory, such as "KV heads 3 -> 4 over 2 devices: 33% more KV, 33% more attention weights".
        Latents (`has_latents`) belong to no head, so their pages cost nothing more."""
        more_weights = (self.num_heads + self.num_kv_heads) / (self.model_heads + self.model_kv_heads) - 1
        if has_latents:
            return f"heads {self.model_heads} -> {self.num_heads} over {self.num_devices} devices: {more_weights:.0%} more weights of heads"
        copied = f", {self.copies} copies of each," if self.copies > 1 else ""
        more_kv = self.num_kv_heads / self.model_kv_heads - 1
        return (
            f"KV heads {self.model_kv_heads} -> {self.num_kv_heads}{copied} over {self.num_devices} devices: "
            f"{more_kv:.0%} more KV, {more_weights:.0%} more attention weights"
        )
