"""Memory of each device by use, and the context that the remaining pages hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.planner.kv_memory import max_context_tokens
from jaxinfer.planner.placement import RolePlacement
from jaxinfer.planner.target import Target


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each device of a stage."""

    total_bytes: int
    reserved_bytes: int
    weight_bytes: int
    activation_bytes: int  # largest program's temporaries, and arrays that stay beside weights and pages
    page_bytes: int
    kv_bytes: int | None = None  # limit for pages, if there is one

    @property
    def room_bytes(self) -> int:
        """Left for pages."""
        left = max(self.total_bytes - self.reserved_bytes - self.weight_bytes - self.activation_bytes, 0)
        return left if self.kv_bytes is None else min(left, self.kv_bytes)

    @property
    def missing_bytes(self) -> int:
        """What weights and activations lack, without any page."""
        return max(self.reserved_bytes + self.weight_bytes + self.activation_bytes - self.total_bytes, 0)


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one role's devices, or of those that both share. Every stage holds a part of each page, so the stage
    with the least room limits their number."""

    placement: RolePlacement
    stages: tuple[StageMemory, ...]
    chunk_size: int

    @property
    def spec(self) -> PageSpec:
        return self.placement.spec

    @property
    def num_pages(self) -> int:
        """Including the null page."""
        return self.placement.pages_within([stage.room_bytes for stage in self.stages])

    @property
    def kv_tokens(self) -> int:
        """The longest single context."""
        pages = self.num_pages
        return max(max_context_tokens(self.spec, pages - 1, self.chunk_size, pages * self.spec.page_size), 0) if pages > 1 else 0

    def kv_bytes(self, stage: int) -> int:
        """Bytes of pages on each device of a stage."""
        return self.num_pages * self.stages[stage].page_bytes


def role_memory(shape: RolePlacement, target: Target, activation_bytes: Sequence[int], chunk_size: int) -> RoleMemory:
    """`activation_bytes`: one a stage."""
    stages = (
        StageMemory(target.memory_bytes, target.reserved_bytes, stage.weight_bytes, activations, stage.page_bytes, target.kv_bytes)
        for stage, activations in zip(shape.stages, activation_bytes, strict=True)
    )
    return RoleMemory(shape, tuple(stages), chunk_size)


def estimated_activations(shape: RolePlacement, batch: int, chunk_size: int) -> list[int]:
    """Bytes on each stage, where no program is compiled: a few numbers a vocabulary entry for each sampled row (last
    stage only), and a few times the MLP width for each token. Usually more than compiled programs take."""
    config, (tp, pp) = shape.architecture, (shape.layout.tp, shape.layout.pp)
    rows = -(-batch // pp)
    of_tokens = 3 * chunk_size * (2 * config.mlp_size // tp + config.hidden_size)
    of_rows = 6 * rows * config.vocab_size // tp
    return [4 * (of_tokens + (of_rows if stage is shape.stages[-1] else 0)) for stage in shape.stages]
