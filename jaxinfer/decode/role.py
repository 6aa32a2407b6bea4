"""DecodeRole: decode with its scheduler, pages and worker. Sequences come to it as a `HandOff`, and may leave it as
one."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from jaxinfer.decode.scheduler import DecodeScheduler, Preempt
from jaxinfer.decode.worker import Decoded, DecodeWorker
from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.kv_transfer.handoff import HandOff, HandOffError, HandOffState, KVTransfer
from jaxinfer.kv_transfer.page_moves import HostPageMover
from jaxinfer.sequence import Sequence


class RollBackError(ValueError):
    """A sequence can't go back so far with the pages that it has. `max_tokens`: how far it can."""

    def __init__(self, sequence: Sequence, num_tokens: int, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        super().__init__(
            f"{sequence.request.request_id!r} can go back by {max_tokens} tokens here, not by {num_tokens}: "
            "pages before are shared, or given back; preempt it to compute them again"
        )


class DecodeRole:
    """Owns a sequence's decode pages from `accept` until it ends (`leave`) or is another role's (`give_back`,
    `close`). `transfer`: how pages get here from this engine's prefill role. `mover`: pages out of this role's pool
    and into it."""

    def __init__(
        self,
        manager: KVManager,
        scheduler: DecodeScheduler,
        worker: DecodeWorker,
        transfer: KVTransfer,
        mover: HostPageMover | None = None,
    ) -> None:
        self.manager, self.scheduler, self.worker, self.transfer, self.mover = manager, scheduler, worker, transfer, mover
        self.incoming: dict[HandOff, KVTransfer] = {}  # accepted, not running yet
        self.outgoing: list[HandOff] = []  # offered by this role, not over yet

    @property
    def running(self) -> list[Sequence]:
        """In scheduling order."""
        return self.scheduler.running

    @property
    def num_in_flight(self) -> int:
        """Steps under way."""
        return self.worker.num_in_flight

    def add_bucket(self, size: int, programs: dict[str, Any]) -> None:
        """Steps of so many sequences may be taken from now on, with these programs."""
        self.worker.runner.add_bucket(size, programs)

    def accept(self, handoff: HandOff, transfer: KVTransfer | None = None) -> bool:
        """Take a sequence on, with pages of this role's, which `transfer` is to fill where they come from elsewhere.
        False, with nothing changed, if there is no room now. Raises `HandOffError` for pages that mean something else
        here."""
        transfer = transfer or self.transfer
        if handoff.geometry != self.manager.spec:
            raise HandOffError(f"pages are {handoff.geometry}, this role's are {self.manager.spec}: run both roles with the same model")
        # Running sequences grow: leave each a page, or one would be preempted at once.
        if not transfer.accept(handoff, handoff.sequence.decode.pages, reserved_pages=len(self.running)):
            return False
        self.incoming[handoff] = transfer
        return True

    def receive(self, handoff: HandOff) -> bool:
        """Get what is ready of an accepted sequence's KV; whether the hand-off is complete by it."""
        self.incoming[handoff].receive(handoff, handoff.sequence.decode.pages)
        return handoff.state is HandOffState.COMPLETE

    def join(self, handoff: HandOff) -> None:
        """A sequence whose hand-off is complete decodes from the next step on."""
        assert handoff.state is HandOffState.COMPLETE, handoff.state
        del self.incoming[handoff]
        self.worker.join(handoff.sequence)

    def cancel(self, handoff: HandOff) -> None:
        """Give up a sequence that does not run yet, and its pages here, in whatever state its hand-off is."""
        handoff.cancel()
        if handoff in self.incoming:
            del self.incoming[handoff]
            self.manager.free(handoff.sequence.decode.pages)

    def launch(self, preempt: Preempt) -> bool:
        """Start the next step; False if no sequence can take one."""
        return self.worker.launch(preempt)

    def sample_launched(self) -> None:
        """Start the sampling of steps that waited for the tokens before them: call it once these are appended."""
        self.worker.sample_launched()

    def collect(self) -> list[Decoded]:
        """The tokens of the oldest step under way, which is waited for. They are the caller's to append."""
        return self.worker.collect()

    def leave(self, sequence: Sequence) -> None:
        """A running sequence ends, or is preempted; its pages stay in the prefix cache as long as there is room."""
        self.worker.leave(sequence)

    def max_roll_back(self, sequence: Sequence) -> int:
        """The most tokens that `roll_back` can take from a running sequence: down to whole blocks that the prefix
        cache has, to what a bounded group has given back, or to the prompt."""
        pages, num_prompt = sequence.decode.pages, sequence.num_prompt
        newest = range(num_prompt - 1, len(sequence.token_ids) - 1)  # positions that may become the newest token's
        first = bisect_left(newest, True, key=lambda position: self.manager.can_rewrite(pages, position, num_prompt))
        return len(newest) - first

    def roll_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Forget the last tokens of a running sequence, at least one. The next steps sample them again: the same ones,
        for draws depend on the seed and on how many tokens came before. What is in flight is dropped.

        Whether a token was published is not known here. Who calls this answers for what clients have, and rewinds the
        text with `OutputBuilder.roll_back` where it had been given the tokens.

        Raises `ValueError` for tokens that it did not generate, `RollBackError` (one too) where the pages don't allow
        it: then delete the tokens and preempt it, and prefill computes what is missing."""
        if not 0 < num_tokens <= sequence.num_output:
            request_id = sequence.request.request_id
            raise ValueError(f"{request_id!r} has generated {sequence.num_output} tokens: {num_tokens} can't be taken back")
        position = len(sequence.token_ids) - num_tokens - 1
        if not self.manager.can_rewrite(sequence.decode.pages, position, sequence.num_prompt):
            raise RollBackError(sequence, num_tokens, self.max_roll_back(sequence))
        self.worker.roll_back(sequence, num_tokens)

    def give_back(self, sequence: Sequence) -> HandOff:
        """Stop a running sequence and offer it to whoever takes it, with its pages, which are kept until `close`.
        Tokens in flight are dropped: whoever goes on samples the same ones."""
        handoff = HandOff(sequence, self.manager.spec, [], len(sequence.token_ids) - 1, len(sequence.token_ids) - 1)
        self.manager.adopt(handoff.pages, sequence.decode.pages)
        self.worker.leave(sequence)
        sequence.restart()
        self.outgoing.append(handoff)
        return handoff

    def offer_cached(self, sequence: Sequence) -> HandOff:
        """The pages that the prefix cache has of a sequence's tokens, all but the last; they are kept until `close`."""
        handoff = HandOff(sequence, self.manager.spec, [], 0, 0)
        num_tokens = self.manager.match_prefix(handoff.pages, sequence, len(sequence.token_ids) - 1)
        handoff.num_tokens = handoff.num_ready = num_tokens
        self.outgoing.append(handoff)
        return handoff

    def close(self, handoff: HandOff) -> None:
        """A hand-off that this role offered is over: let go of its pages."""
        assert handoff.is_over, handoff.state
        self.outgoing.remove(handoff)
        self.manager.free(handoff.pages)
