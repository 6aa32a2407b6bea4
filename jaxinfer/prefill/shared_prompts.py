"""SharedPrompts: prompts that a request's first sequence computed, which its other sequences (`n`) fork. Imports no
JAX."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxinfer.kv_cache.manager import KVManager
from jaxinfer.sequence import Sequence


@dataclass(slots=True)
class _SharedPrompt:
    last_hidden: Any  # the prompt's last hidden state, on the device, from which first tokens are sampled
    siblings: set[Sequence]  # not started yet


class SharedPrompts:
    """A prompt's pages are kept while siblings wait, or until others need them; then siblings compute what is not
    cached."""

    def __init__(self, manager: KVManager) -> None:
        self._manager = manager
        self._prompts: dict[Sequence, _SharedPrompt] = {}  # by leader

    def add(self, leader: Sequence, siblings: Iterable[Sequence], last_hidden: Any) -> None:
        """Keep a leader's prompt, which is computed, for its siblings."""
        self._manager.share(leader, leader.prefill.pages)
        self._prompts[leader] = _SharedPrompt(last_hidden, set(siblings))

    def has(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can fork its leader's prompt."""
        leader = sequence.prefill.leader
        prompt = None if leader is None else self._prompts.get(leader)
        return prompt is not None and sequence in prompt.siblings and self._manager.is_shared(leader)

    def last_hidden(self, sequence: Sequence) -> Any:
        """The last hidden state of its leader's prompt, on the device."""
        assert sequence.prefill.leader is not None
        return self._prompts[sequence.prefill.leader].last_hidden

    def start(self, sequence: Sequence, reserved_pages: int) -> list[tuple[int, int]] | None:
        """Fork the prompt's page table for a sequence. Returns (source, target) pages to copy; None, with nothing
        changed, if fewer than `reserved_pages` blocks' pages would be left."""
        assert sequence.prefill.leader is not None
        return self._manager.fork(sequence.prefill.leader, sequence.prefill.pages, sequence.num_prompt, reserved_pages)

    def leave(self, sequence: Sequence) -> None:
        """Call when a sequence has started, or never will."""
        prompt = None if sequence.prefill.leader is None else self._prompts.get(sequence.prefill.leader)
        if prompt is not None:
            prompt.siblings.discard(sequence)
            if not prompt.siblings:
                del self._prompts[sequence.prefill.leader]  # type: ignore[arg-type]
                self._manager.unshare(sequence.prefill.leader)
