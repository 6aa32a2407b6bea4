"""A plan for a target: memory and speed of a model in a layout, with its programs compiled where possible."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxinfer.config import ConfigError
from jaxinfer.planner.cost import StepTimes, decode_steps, prefill_steps
from jaxinfer.planner.memory import RoleMemory, role_memory
from jaxinfer.planner.placement import Layouts, RolePlacement
from jaxinfer.planner.search import Candidate, PlanSettings, candidate, fits_somehow, rank
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from jaxinfer.planner.target_programs import CompiledProgram, activation_bytes, compile_role
from sharding.layout import Parallel

_MORE = tuple(2**n for n in range(7))  # numbers of devices to try where the target has too few


@dataclass(frozen=True)
class TargetPlan:
    """The plan of one layout of both roles."""

    target: Target
    setting: PlanSettings
    chosen: Candidate  # with activations as compiled, or estimated
    is_compiled: bool
    decode_programs: tuple[CompiledProgram, ...]  # one a stage; empty if not compiled
    prefill_programs: tuple[CompiledProgram, ...]
    decode_steps: StepTimes
    prefill_steps: StepTimes
    ranked: tuple[Candidate, ...]  # all layouts, if they were searched
    changes: tuple[str, ...]  # that would make it fit, if it doesn't
    notes: tuple[str, ...]  # choices and their reasons

    @property
    def fits(self) -> bool:
        return self.chosen.fits

    @property
    def kv_tokens(self) -> int:
        return self.chosen.kv_tokens

    @property
    def roles(self) -> list[tuple[str, RolePlacement, RoleMemory]]:
        """Name, placement and memory of each role; one entry where both share devices."""
        chosen = self.chosen
        of_decode = chosen.decode, chosen.decode_memory
        if chosen.layouts.is_shared:
            return [("prefill and decode", *of_decode)]
        return [("prefill", chosen.prefill, chosen.prefill_memory), ("decode", *of_decode)]


def named_layouts(target: Target, prefill: str | None, decode: str | None) -> Layouts | None:
    """Layouts from the command's flags, as the engine reads them: equal ones share devices. None if neither is given.
    Raises `ConfigError`."""
    given: dict[str, Parallel] = {}
    for role, text in (("prefill", prefill), ("decode", decode)):
        if text is not None:
            try:
                given[role] = Parallel.parse(text)
            except ValueError as error:
                raise ConfigError(f"{role}_parallel is {text!r}: {error}") from error
    if not given:
        return None
    of_prefill, of_decode = given.get("prefill", given.get("decode")), given.get("decode", given.get("prefill"))
    assert of_prefill is not None and of_decode is not None
    layouts = Layouts(of_prefill, of_decode, of_prefill == of_decode)
    if layouts.num_devices > target.num_devices:
        least = replace(target, num_devices=layouts.num_devices)
        raise ConfigError(
            f"{layouts} take {layouts.num_devices} devices, but {target} has {target.num_devices}: give a target of {layouts.num_devices} or more, "
            f"such as {least}, or layouts whose tp times pp add up to {target.num_devices} or less"
        )
    return layouts


def plan_target(shapes: TargetModel, setting: PlanSettings, layouts: Layouts | None = None, *, num_compiled: int = 1) -> TargetPlan:
    """The plan of these layouts. Without them: of the best for the workload, as one engine on the whole target, that
    still fits after its programs are compiled; the first `num_compiled` are compiled, 0 for none.

    Raises `ConfigError` for layouts that this model can't have."""
    notes: list[str] = []
    ranked: list[Candidate] = []
    if layouts is None:
        ranked = rank(shapes, setting)
        options = [one for one in ranked if one.num_engines == 1]
        if not options:
            raise ConfigError(f"target is {shapes.target}: this model has no layout of {shapes.target.num_devices} devices; use fewer")
        if ranked[0].num_engines > 1 and ranked[0].fits:
            notes.append(f"{ranked[0].num_engines} engines, each of {ranked[0].layouts}, would do more than one of all devices")
    else:
        options = [candidate(shapes, layouts, setting)]
    programs = _Programs((), ())
    chosen, tried = options[0], []
    try:
        for option in options[:num_compiled]:
            if option.missing_weight_bytes:
                notes.append("not compiled: weights alone take more than a device has")
                break
            compiled = _compile(shapes, option, setting)
            tried.append((_with_compiled(shapes, option, setting, compiled), compiled))
        if tried:
            chosen, programs = next((one for one in tried if one[0].fits), tried[0])
    except RuntimeError as error:  # no compiler for these cards on this machine
        notes.append(str(error))
    of_tried = {one.layouts: one for one, _ in tried}
    ranked = [of_tried.get(one.layouts, one) if one.num_engines == 1 else one for one in ranked]
    idle = shapes.target.num_devices - chosen.layouts.num_devices
    if idle:
        notes.append(f"{idle} device(s) idle")
    notes += dict.fromkeys((*chosen.placement.notes, *chosen.prefill.notes, *chosen.decode.notes))
    hardware = shapes.target.hardware
    if not hardware.is_measured:
        notes.append(f"step times: by data sheets, not measured on a {shapes.target.card}")
    return TargetPlan(
        shapes.target,
        setting,
        chosen,
        bool(programs.decode),
        programs.decode,
        programs.prefill,
        decode_steps(chosen.decode, chosen.batch, setting.workload.decode_context, hardware),
        prefill_steps(chosen.prefill, 1, setting.chunk_size, setting.chunk_size, hardware),
        tuple(ranked),
        () if chosen.fits else tuple(_changes(shapes, setting, chosen)),
        tuple(notes),
    )


class _Programs(NamedTuple):
    """One program a stage; empty if not compiled."""

    decode: tuple[CompiledProgram, ...]
    prefill: tuple[CompiledProgram, ...]


def _compile(shapes: TargetModel, chosen: Candidate, setting: PlanSettings) -> _Programs:
    target, context = shapes.target, setting.context
    first = 0 if chosen.layouts.is_shared else chosen.layouts.prefill.num_devices
    rows = -(-chosen.batch // chosen.layouts.decode.pp)
    decode = compile_role(chosen.decode, target, first, context, rows)
    return _Programs(decode, compile_role(chosen.prefill, target, 0, context, setting.chunk_size))


def _with_compiled(shapes: TargetModel, chosen: Candidate, setting: PlanSettings, programs: _Programs) -> Candidate:
    def memory(shape: RolePlacement, activations: list[int]) -> RoleMemory:
        return role_memory(shape, shapes.target, activations, setting.chunk_size)

    if chosen.layouts.is_shared:
        of_both = memory(chosen.decode, activation_bytes(programs.decode, programs.prefill))
        return replace(chosen, prefill_memory=of_both, decode_memory=of_both)
    return replace(
        chosen,
        prefill_memory=memory(chosen.prefill, [program.stays_bytes + program.temporary_bytes for program in programs.prefill]),
        decode_memory=memory(chosen.decode, [program.stays_bytes + program.temporary_bytes for program in programs.decode]),
    )


def _changes(shapes: TargetModel, setting: PlanSettings, tried: Candidate) -> list[str]:
    """The smallest change of each kind after which the model fits, by arithmetic."""
    found = []
    others = [one for one in rank(shapes, setting) if one.fits]
    if others:
        found.append(f"another layout of {shapes.target}: {others[0].layouts}")
    if tried.kv_tokens > 0:
        found.append(f"less context: --context {tried.kv_tokens}")
    more = next((n for n in _MORE if n > shapes.target.num_devices and fits_somehow(shapes.on(n), setting)), None)
    if not others and not shapes.target.is_cpu and more is not None:
        found.append(f"more of the same cards: {shapes.on(more).target}")
    return found
