"""Roles by themselves, as in processes that share nothing: sequences and pages cross as bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from jaxinfer.decode.role import DecodeRole
from jaxinfer.engine import Engine
from jaxinfer.engine.output import output_progress
from jaxinfer.kv_transfer.cross_mesh import CrossMeshTransfer
from jaxinfer.kv_transfer.handoff import HandOff
from jaxinfer.kv_transfer.handoff_bytes import from_bytes, to_bytes
from jaxinfer.kv_transfer.page_moves import PageMover
from jaxinfer.kv_transfer.page_transport import PageCopier
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.request import DEFAULT_CONTEXT, SamplingParams
from jaxinfer.sequence import Sequence as EngineSequence
from jaxinfer.sequence import SequenceState


class HostTransport:
    """Pages from one pool to another by way of bytes."""

    def __init__(self, source: PageMover, target: PageMover) -> None:
        self._source, self._target = source, target

    def move(self, source_ids: Sequence[int], target_ids: Sequence[int], groups: Sequence[int]) -> None:
        gathered = self._source.gather(source_ids)
        gathered.copy_to_host_async()
        pages = np.asarray(gathered)[: len(source_ids)]
        sent = [page.tobytes() for page in pages]
        received = np.stack([np.frombuffer(page, np.uint8) for page in sent])
        self._target.scatter(self._target.put_bytes(received), target_ids)


def link(source: PrefillRole | DecodeRole, target: DecodeRole) -> CrossMeshTransfer:
    """How a role's pages get to a decode role that shares nothing with it."""
    assert source.mover is not None
    assert target.mover is not None
    return CrossMeshTransfer(target.manager, PageCopier(HostTransport(source.mover, target.mover), target.manager.spec.num_groups))


def sent(handoff: HandOff, engine: Engine) -> HandOff:
    """As an engine's process has it from another's bytes, sent by a clock that shows another time."""
    far = time.monotonic() + 1e6
    near = handoff.sequence.request.arrival_time
    received = from_bytes(to_bytes(handoff, near), far, lambda params, ids: output_progress(engine.tokenizer, params, ids))
    assert math.isclose(received.sequence.request.arrival_time, far)
    return received


def sequences(engine: Engine, request_id: str, prompt: list[int], params: SamplingParams) -> list[EngineSequence]:
    return engine._intake.sequences(request_id, prompt, params, DEFAULT_CONTEXT)


def never(*arguments: object) -> None:
    raise AssertionError("nobody is to be preempted")


def no_preemption(*arguments: object) -> bool:
    return False


def prefill_step(role: PrefillRole, num_free_slots: int = 8, wait: int = 10) -> list[EngineSequence]:
    """Launch a step and read all; returns who waits for a decode role since. Sequences of one token end."""
    role.poll_tiers()
    role.launch(role.budget(0, 0.0, 0.0), num_free_slots, 0, no_preemption, no_preemption)
    prefilled = []
    for sequence, token_id, _ in role.collect(wait=wait):
        sequence.token_ids.append(token_id)
        if is_finished(sequence):
            role.remove(sequence)
            sequence.state = SequenceState.FINISHED
        else:
            role.keep(sequence)
            prefilled.append(sequence)
    return prefilled


def prefill(role: PrefillRole, *new: EngineSequence) -> None:
    """From the first chunk to the first token."""
    for sequence in new:
        role.add(sequence)
    for _ in range(1000):
        if not role.has_prompts:
            return
        prefill_step(role)
    raise AssertionError("prefill never came to an end")


def is_finished(sequence: EngineSequence) -> bool:
    return len(sequence.token_ids) >= sequence.max_total_tokens or sequence.token_ids[-1] in sequence.end_tokens


def decode_step(role: DecodeRole, preempt: object = never) -> list[EngineSequence]:
    """Launch a step if there is anything to, read the one before; returns who ended by it."""
    launched = role.launch(preempt)  # type: ignore[arg-type]
    if role.num_in_flight <= (1 if launched else 0):
        return []
    ended = []
    for sequence, token_id, _ in role.collect():
        sequence.token_ids.append(token_id)
        if is_finished(sequence):
            role.leave(sequence)
            sequence.state = SequenceState.FINISHED  # so that what a step under way gives it is ignored
            ended.append(sequence)
    return ended


def drain(role: DecodeRole, preempt: object = never) -> None:
    """Until nothing runs and nothing is under way."""
    while role.running or role.num_in_flight:
        decode_step(role, preempt)


def pull(handoff: HandOff, source: PrefillRole | DecodeRole, target: DecodeRole, engine: Engine) -> EngineSequence:
    """All of a hand-off at once, over bytes; the sequence that runs at the target."""
    received = sent(handoff, engine)
    assert target.accept(received, link(source, target))
    assert target.receive(received)
    target.join(received)
    for state in ("accepted", "transferring", "complete"):
        handoff.to(type(handoff.state)(state))
    source.close(handoff)
    return received.sequence
