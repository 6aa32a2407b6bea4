"""All layouts of a model on a target, by arithmetic, ranked by what a workload comes to in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from jaxinfer.config import ConfigError
from jaxinfer.dry_run.memory import RoleMemory, estimated_activations, role_memory
from jaxinfer.dry_run.predict import Speed, most_sequences, speed
from jaxinfer.dry_run.shapes import RoleShape, Shapes
from jaxinfer.dry_run.workload import Workload
from sharding.layout import Parallel

MOST_SEQUENCES = 256  # that decode at once, where nothing else bounds them


@dataclass(frozen=True)
class Layouts:
    """Of both roles: on the same devices, where they share them, else prefill's first and decode's after them."""

    prefill: Parallel
    decode: Parallel
    is_shared: bool

    @property
    def num_devices(self) -> int:
        return self.decode.num_devices + (0 if self.is_shared else self.prefill.num_devices)

    def __str__(self) -> str:
        return f"both {self.decode}" if self.is_shared else f"prefill {self.prefill}; decode {self.decode}"


@dataclass(frozen=True)
class Setting:
    """What a plan is for."""

    context: int  # tokens that one request may have
    workload: Workload
    batch: int | None = None  # sequences that decode at once; None: as many as there is room for
    chunk_size: int = 2048  # tokens of a step of prefill


@dataclass(frozen=True)
class Candidate:
    """A layout with what it comes to by arithmetic."""

    layouts: Layouts
    prefill: RoleShape
    decode: RoleShape
    prefill_memory: RoleMemory
    decode_memory: RoleMemory  # the same as prefill's where they share devices
    context: int
    batch: int  # 1 where not even one sequence of the workload fits
    speed: Speed
    num_engines: int = 1  # of this layout, side by side on the target

    @property
    def kv_tokens(self) -> int:
        """Of one context, which prefill and decode both have to hold."""
        return min(self.prefill_memory.kv_tokens, self.decode_memory.kv_tokens)

    @property
    def missing_bytes(self) -> int:
        """By which the fullest device is too small for what is no page."""
        return max(stage.missing_bytes for memory in (self.prefill_memory, self.decode_memory) for stage in memory.stages)

    @property
    def missing_weight_bytes(self) -> int:
        """By which it is too small for weights alone."""
        stages = [stage for memory in (self.prefill_memory, self.decode_memory) for stage in memory.stages]
        return max(0, *(stage.reserved_bytes + stage.weight_bytes - stage.total_bytes for stage in stages))

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.context


def candidate(shapes: Shapes, layouts: Layouts, setting: Setting, num_engines: int = 1) -> Candidate:
    """Raises `ConfigError` for a layout that this model can't have."""
    shapes = shapes.in_layouts(layouts.prefill, layouts.decode)
    prefill = shapes.layout("prefill", layouts.prefill, is_shared=layouts.is_shared)
    decode = shapes.layout("decode", layouts.decode, is_shared=layouts.is_shared)
    batch = setting.batch

    def memory(shape: RoleShape, sequences: int) -> RoleMemory:
        return role_memory(
            shape, shapes.target, shapes.spec, estimated_activations(shape, sequences, setting.chunk_size), setting.chunk_size
        )

    if batch is None:
        of_decode = memory(decode, MOST_SEQUENCES)
        each = shapes.spec.max_pages(round(setting.workload.mean_input + setting.workload.mean_output), setting.chunk_size)
        batch = max(most_sequences(of_decode.num_pages - 1, each, MOST_SEQUENCES), 1)
    of_decode = memory(decode, batch)
    of_prefill = of_decode if layouts.is_shared else memory(prefill, 1)
    found = speed(prefill, decode, setting.workload, batch, setting.chunk_size, shapes.target.hardware, is_shared=layouts.is_shared)
    return Candidate(layouts, prefill, decode, of_prefill, of_decode, setting.context, batch, found, num_engines)


def rank(shapes: Shapes, setting: Setting) -> list[Candidate]:
    """All that the model can have, those that fit first, the most requests a second first among them, and of those within 2% of one another the
    one with the least time between tokens; then those that lack least."""
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


def fits_somehow(shapes: Shapes, setting: Setting) -> bool:
    """Whether one engine on all of the target, of whatever layout that both roles share, has room."""
    for layout in _of_devices(shapes, shapes.target.num_devices):
        with suppress(ConfigError):
            if candidate(shapes, Layouts(layout, layout, True), setting).fits:
                return True
    return False


def _all(shapes: Shapes) -> Iterator[tuple[Layouts, int]]:
    """With how many engines of each there is room for."""
    total = shapes.target.num_devices
    for num_devices in range(1, total + 1):
        if total % num_devices == 0:
            for layout in _of_devices(shapes, num_devices):
                yield Layouts(layout, layout, True), total // num_devices
        for prefill in _of_devices(shapes, num_devices):
            for decode in _of_devices(shapes, total - num_devices):
                yield Layouts(prefill, decode, False), 1


def _of_devices(shapes: Shapes, num_devices: int) -> Iterator[Parallel]:
    for tp in range(1, num_devices + 1):
        is_cut = num_devices % tp == 0 and num_devices // tp <= shapes.architecture.num_layers
        if is_cut and shapes.architecture.mlp_size % tp == 0:
            yield Parallel(tp, num_devices // tp)
            if tp > 1 and shapes.routing is not None and shapes.routing.num_experts % tp == 0:
                yield Parallel(tp, num_devices // tp, tp)
