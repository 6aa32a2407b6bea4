"""Which workers a request goes to. Pure: state in, decision out; no clocks, no sockets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerView:
    """What the policy sees of a worker. `num_tokens`: of prompts that it has still to compute; `num_sequences`: that it
    decodes, or will."""

    worker_id: str
    role: str
    num_tokens: int
    num_sequences: int
    max_batch_size: int

    @property
    def can_prefill(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def can_decode(self) -> bool:
        return self.role in ("decode", "both")


@dataclass(frozen=True)
class Choice:
    """`prefill`: the worker that computes the prompt; None: the one that decodes."""

    decode: str
    prefill: str | None
    reason: str


SHORT_PROMPT = 64  # tokens: what so few cost is less than what moving them does


def choose(workers: Sequence[WorkerView], num_tokens: int, without: Collection[str] = (), *, may_move: bool = True) -> Choice | None:
    """The least loaded workers for a prompt with so many tokens to compute; None where nobody can decode. `without`:
    workers not to be asked; `may_move`: whether another worker than decode's may prefill it."""
    known = [worker for worker in workers if worker.worker_id not in without]
    # A worker that only prefills has both programs: with no other left it decodes too.
    decoders = [worker for worker in known if worker.can_decode] or known
    if not decoders:
        return None
    decode = min(decoders, key=lambda worker: (worker.num_sequences / worker.max_batch_size, worker.num_tokens, worker.worker_id))
    prefillers = [worker for worker in known if worker.can_prefill and worker.worker_id != decode.worker_id]
    if not may_move or not prefillers:
        return Choice(decode.worker_id, None, "no other worker prefills" if may_move else "it can't be handed over")
    prefill = min(prefillers, key=lambda worker: (worker.num_tokens, worker.worker_id))
    if num_tokens < SHORT_PROMPT:
        return Choice(decode.worker_id, None, "short prompt")
    if decode.can_prefill and prefill.role != "prefill" and decode.num_tokens <= prefill.num_tokens:
        return Choice(decode.worker_id, None, "decode's worker has room for it")
    return Choice(decode.worker_id, prefill.worker_id, "prefilled apart")
