"""Where each device's memory goes, and how much context the pages hold that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.dry_run.shapes import RoleShape
from jaxinfer.dry_run.target import Target
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.plan import max_context_tokens


@dataclass(frozen=True)
class StageMemory:
    """Of each device of a stage, in bytes."""

    total_bytes: int
    reserved_bytes: int
    weight_bytes: int
    activation_bytes: int  # temporaries of the program that needs most, and what stays beside weights and pages
    page_bytes: int
    kv_bytes: int | None = None  # that pages may take at most

    @property
    def room_bytes(self) -> int:
        """For pages: what all else leaves, or the most that they may take."""
        left = max(self.total_bytes - self.reserved_bytes - self.weight_bytes - self.activation_bytes, 0)
        return left if self.kv_bytes is None else min(left, self.kv_bytes)

    @property
    def missing_bytes(self) -> int:
        """By which all else is too much."""
        return max(self.reserved_bytes + self.weight_bytes + self.activation_bytes - self.total_bytes, 0)


@dataclass(frozen=True)
class RoleMemory:
    """Of one role's devices, or of those that both share. A page is held by all stages together: what the fullest stage has room for counts."""

    spec: PageSpec
    stages: tuple[StageMemory, ...]
    chunk_size: int

    @property
    def num_pages(self) -> int:
        """The null page included."""
        return min(stage.room_bytes // stage.page_bytes for stage in self.stages)

    @property
    def kv_tokens(self) -> int:
        """Of one context, if it has all pages."""
        pages = self.num_pages
        return max(max_context_tokens(self.spec, pages - 1, self.chunk_size, pages * self.spec.page_size), 0) if pages > 1 else 0

    def kv_bytes(self, stage: int) -> int:
        """Of pages, on each device of a stage."""
        return self.num_pages * self.stages[stage].page_bytes


def role_memory(shape: RoleShape, target: Target, spec: PageSpec, activation_bytes: Sequence[int], chunk_size: int) -> RoleMemory:
    """`activation_bytes`: of each stage."""
    stages = (
        StageMemory(target.memory_bytes, target.reserved_bytes, stage.weight_bytes, activations, stage.page_bytes, target.kv_bytes)
        for stage, activations in zip(shape.stages, activation_bytes, strict=True)
    )
    return RoleMemory(spec, tuple(stages), chunk_size)


def estimated_activations(shape: RoleShape, batch: int, chunk_size: int) -> list[int]:
    """Of each stage, where no program is compiled: a few numbers a word of the vocabulary for each row that is sampled, in the last stage; a few
    times the MLP's width for each token. More than compiled programs take, as a rule."""
    config, (tp, pp) = shape.architecture, (shape.layout.tp, shape.layout.pp)
    rows = -(-batch // pp)
    of_tokens = 3 * chunk_size * (2 * config.mlp_size // tp + config.hidden_size)
    of_rows = 6 * rows * config.vocab_size // tp
    return [4 * (of_tokens + (of_rows if stage is shape.stages[-1] else 0)) for stage in shape.stages]
