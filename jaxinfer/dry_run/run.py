"""A dry run: what a model comes to in a layout on a target, its programs compiled where they can be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxinfer.config import ConfigError
from jaxinfer.dry_run.memory import RoleMemory, role_memory
from jaxinfer.dry_run.predict import Steps, decode_steps, prefill_steps
from jaxinfer.dry_run.programs import Compiled, activation_bytes, compile_role
from jaxinfer.dry_run.search import Candidate, Layouts, Setting, candidate, fits_somehow, rank
from jaxinfer.dry_run.shapes import RoleShape, Shapes
from jaxinfer.dry_run.target import Target
from sharding.layout import Parallel

_MORE = tuple(2**n for n in range(7))  # devices that are tried where those of the target are too few


@dataclass(frozen=True)
class DryRun:
    """Of one layout of both roles."""

    target: Target
    setting: Setting
    chosen: Candidate  # memory with activations as they were compiled, or estimated
    is_compiled: bool
    decode_programs: tuple[Compiled, ...]  # of each stage; none where they were not compiled
    prefill_programs: tuple[Compiled, ...]
    decode_steps: Steps
    prefill_steps: Steps
    ranked: tuple[Candidate, ...]  # all layouts, where they were searched
    changes: tuple[str, ...]  # that would make it fit, if it doesn't
    notes: tuple[str, ...]  # what was chosen, and why

    @property
    def fits(self) -> bool:
        return self.chosen.fits

    @property
    def kv_tokens(self) -> int:
        return self.chosen.kv_tokens

    @property
    def roles(self) -> list[tuple[str, RoleShape, RoleMemory]]:
        """Their names, and what their devices hold; one where both roles have the same."""
        chosen = self.chosen
        of_decode = chosen.decode, chosen.decode_memory
        if chosen.layouts.is_shared:
            return [("prefill and decode", *of_decode)]
        return [("prefill", chosen.prefill, chosen.prefill_memory), ("decode", *of_decode)]


def named_layouts(target: Target, prefill: str | None, decode: str | None) -> Layouts | None:
    """From the command's flags, as an engine reads them: roles of one layout share devices. None where neither is given. Raises `ConfigError`."""
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


def dry_run(shapes: Shapes, setting: Setting, layouts: Layouts | None = None, *, num_compiled: int = 1) -> DryRun:
    """Of these layouts; where none are given, of the best that there are for the workload, of those that are one engine on all of the target and,
    of the first `num_compiled` of them, fit once they are compiled. 0: nothing is compiled.

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
    except RuntimeError as error:  # there is no compiler for these cards here
        notes.append(str(error))
    of_tried = {one.layouts: one for one, _ in tried}
    ranked = [of_tried.get(one.layouts, one) if one.num_engines == 1 else one for one in ranked]
    idle = shapes.target.num_devices - chosen.layouts.num_devices
    if idle:
        notes.append(f"{idle} device(s) idle")
    notes += dict.fromkeys((*chosen.prefill.notes, *chosen.decode.notes))
    hardware = shapes.target.hardware
    if not hardware.is_measured:
        notes.append(f"step times: by data sheets, not measured on a {shapes.target.card}")
    return DryRun(
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
    """Of each stage; none where they were not compiled."""

    decode: tuple[Compiled, ...]
    prefill: tuple[Compiled, ...]


def _compile(shapes: Shapes, chosen: Candidate, setting: Setting) -> _Programs:
    target, spec, context = shapes.target, chosen.decode_memory.spec, setting.context
    first = 0 if chosen.layouts.is_shared else chosen.layouts.prefill.num_devices
    rows = -(-chosen.batch // chosen.layouts.decode.pp)
    decode = compile_role("decode", chosen.decode, spec, target, first, context, rows)
    return _Programs(decode, compile_role("prefill", chosen.prefill, spec, target, 0, context, setting.chunk_size))


def _with_compiled(shapes: Shapes, chosen: Candidate, setting: Setting, programs: _Programs) -> Candidate:
    def memory(shape: RoleShape, activations: list[int]) -> RoleMemory:
        return role_memory(shape, shapes.target, chosen.decode_memory.spec, activations, setting.chunk_size)

    if chosen.layouts.is_shared:
        of_both = memory(chosen.decode, activation_bytes(programs.decode, programs.prefill))
        return replace(chosen, prefill_memory=of_both, decode_memory=of_both)
    return replace(
        chosen,
        prefill_memory=memory(chosen.prefill, [program.stays_bytes + program.temporary_bytes for program in programs.prefill]),
        decode_memory=memory(chosen.decode, [program.stays_bytes + program.temporary_bytes for program in programs.decode]),
    )


def _changes(shapes: Shapes, setting: Setting, tried: Candidate) -> list[str]:
    """The smallest changes after which it fits, by arithmetic: each of another kind."""
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
