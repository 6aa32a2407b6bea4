"""All layouts of a model on a target, by arithmetic, ranked by a workload's throughput."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from jaxinfer.config import ConfigError
from jaxinfer.planner.cost import Speed, most_sequences, speed
from jaxinfer.planner.memory import RoleMemory, estimated_activations, role_memory
from jaxinfer.planner.placement import Layouts, Placement, RolePlacement
from jaxinfer.planner.target_model import TargetModel
from jaxinfer.planner.workload import Workload
from sharding.layout import Parallel

MOST_SEQUENCES = 256  # of a decode batch, if memory does not limit it further


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is for."""

    context: int  # tokens of the longest request
    workload: Workload
    batch: int | None = None  # sequences that decode at once; None: as many as fit
    chunk_size: int = 2048  # tokens of a prefill step


@dataclass(frozen=True)
class Candidate:
    """A layout, its memory and its speed, by arithmetic."""

    layouts: Layouts
    placement: Placement
    prefill_memory: RoleMemory
    decode_memory: RoleMemory  # the same as prefill's where they share devices
    context: int
    batch: int  # 1 if not even one sequence of the workload fits
    speed: Speed
    num_engines: int = 1  # of this layout, side by side on the target

    @property
    def prefill(self) -> RolePlacement:
        return self.placement.prefill

    @property
    def decode(self) -> RolePlacement:
        return self.placement.decode

    @property
    def kv_tokens(self) -> int:
        """The longest context, which must fit into both roles' pools."""
        return min(self.prefill_memory.kv_tokens, self.decode_memory.kv_tokens)

    @property
    def missing_bytes(self) -> int:
        """What the fullest device lacks for weights and activations."""
        return max(stage.missing_bytes for memory in (self.prefill_memory, self.decode_memory) for stage in memory.stages)

    @property
    def missing_weight_bytes(self) -> int:
        """What the fullest device lacks for weights alone."""
        stages = [stage for memory in (self.prefill_memory, self.decode_memory) for stage in memory.stages]
        return max(0, *(stage.reserved_bytes + stage.weight_bytes - stage.total_bytes for stage in stages))

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.context


def candidate(shapes: TargetModel, layouts: Layouts, setting: PlanSettings, num_engines: int = 1) -> Candidate:
    """Raises `ConfigError` for a layout that this model can't have."""
    placement = shapes.place(layouts)
    prefill, decode, batch = placement.prefill, placement.decode, setting.batch

    def memory(shape: RolePlacement, sequences: int) -> RoleMemory:
        return role_memory(shape, shapes.target, estimated_activations(shape, sequences, setting.chunk_size), setting.chunk_size)

    if batch is None:
        of_decode = memory(decode, MOST_SEQUENCES)
        each = placement.spec.max_pages(round(setting.workload.mean_input + setting.workload.mean_output), setting.chunk_size)
        batch = max(most_sequences(of_decode.num_pages - 1, each, MOST_SEQUENCES), 1)
    of_decode = memory(decode, batch)
    of_prefill = of_decode if layouts.is_shared else memory(prefill, 1)
    found = speed(prefill, decode, setting.workload, batch, setting.chunk_size, shapes.target.hardware, is_shared=layouts.is_shared)
    return Candidate(layouts, placement, of_prefill, of_decode, setting.context, batch, found, num_engines)


def rank(shapes: TargetModel, setting: PlanSettings) -> list[Candidate]:
    """All layouts that the model can have. Those that fit come first, by requests a second; within 2% of each other, by
    time between tokens. Then the others, by missing memory."""
    found = []
    for layouts, num_engines in _all(shapes):
        try:
            found.append(candidate(shapes, layouts, setting, num_engines))
        except ConfigError:
            continue
    found.sort(key=lambda one: (not one.fits, one.missing_bytes, -one.num_engines * one.speed.requests_per_second))
    ranked: list[Candidate] = []
    while found:
        best = found[0]
        pace = best.num_engines * best.speed.requests_per_second
        alike = [one for one in found if one.fits == best.fits and one.num_engines * one.speed.requests_per_second >= 0.98 * pace]
        alike = alike if best.fits else [best]
        ranked += sorted(alike, key=lambda one: (one.speed.token_seconds, one.layouts.num_devices))
        found = found[len(alike) :]
    return ranked


def fits_somehow(shapes: TargetModel, setting: PlanSettings) -> bool:
    """Whether one engine on the whole target fits in any layout that both roles share."""
    for layout in _of_devices(shapes, shapes.target.num_devices):
        with suppress(ConfigError):
            if candidate(shapes, Layouts(layout, layout, True), setting).fits:
                return True
    return False


def _all(shapes: TargetModel) -> Iterator[tuple[Layouts, int]]:
    """All layouts, each with the number of engines that the target has devices for."""
    total = shapes.target.num_devices
    for num_devices in range(1, total + 1):
        if total % num_devices == 0:
            for layout in _of_devices(shapes, num_devices):
                yield Layouts(layout, layout, True), total // num_devices
        for prefill in _of_devices(shapes, num_devices):
            for decode in _of_devices(shapes, total - num_devices):
                yield Layouts(prefill, decode, False), 1


def _of_devices(shapes: TargetModel, num_devices: int) -> Iterator[Parallel]:
    for tp in range(1, num_devices + 1):
        is_cut = num_devices % tp == 0 and num_devices // tp <= shapes.architecture.num_layers
        if is_cut and shapes.architecture.mlp_size % tp == 0:
            yield Parallel(tp, num_devices // tp)
            if tp > 1 and shapes.routing is not None and shapes.routing.num_experts % tp == 0:
                yield Parallel(tp, num_devices // tp, tp)
