"""SharedPrompts: what a request's first sequence computed, for the others of the request (`n`) to start from. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.sequence import Sequence


@dataclass(slots=True)
class _SharedPrompt:
    last_hidden: Any  # on the device: what the prompt's last token left, from which its next one is sampled
    siblings: set[Sequence]  # that have not started yet


class SharedPrompts:
    """A prompt is kept while siblings wait, or until its pages are needed by others; then siblings compute what they don't find cached."""

    def __init__(self, manager: KVManager) -> None:
        self._manager = manager
        self._prompts: dict[Sequence, _SharedPrompt] = {}  # by leader

    def add(self, leader: Sequence, siblings: Iterable[Sequence], last_hidden: Any) -> None:
        """A leader's whole prompt is in its pages."""
        self._manager.share(leader, leader.prefill_pages)
        self._prompts[leader] = _SharedPrompt(last_hidden, set(siblings))

    def has(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can start from its leader's prompt."""
        leader = sequence.leader
        prompt = None if leader is None else self._prompts.get(leader)
        return prompt is not None and sequence in prompt.siblings and self._manager.is_shared(leader)

    def last_hidden(self, sequence: Sequence) -> Any:
        """What the last token of its leader's prompt left, on the device."""
        assert sequence.leader is not None
        return self._prompts[sequence.leader].last_hidden

    def start(self, sequence: Sequence, reserved_pages: int) -> list[tuple[int, int]] | None:
        """Give a sequence its page table. Returns which pages are to be copied to which; None, and nothing changed, if that would leave fewer
        than `reserved_pages` runs' pages."""
        assert sequence.leader is not None
        return self._manager.fork(sequence.leader, sequence.prefill_pages, sequence.num_prompt, reserved_pages)

    def leave(self, sequence: Sequence) -> None:
        """A sequence has started, or never will."""
        prompt = None if sequence.leader is None else self._prompts.get(sequence.leader)
        if prompt is not None:
            prompt.siblings.discard(sequence)
            if not prompt.siblings:
                del self._prompts[sequence.leader]  # type: ignore[arg-type]
                self._manager.unshare(sequence.leader)
