"""What a model thinks before it answers, between two markers of its chat template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's thoughts."""

    name: str
    begin: str
    end: str


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    reasoning.name: reasoning
    for reasoning in (
        ReasoningFormat("think", "<think>", "</think>"),  # DeepSeek R1 and V3.1, Qwen3, Kimi K2, SmolLM3
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),  # Magistral
    )
}


def reasoning_format_of(template: str, setting: str = "auto") -> ReasoningFormat | None:
    """The markers of a model with this chat template. `setting`: auto, none, or the name of a format."""
    if setting != "auto":
        return REASONING_FORMATS.get(setting)
    return next((known for known in REASONING_FORMATS.values() if known.end in template), None)


class ReasoningSplitter:
    """Tells thoughts from the answer, in pieces of any size. Only thoughts that an answer begins with are such.

    `is_open`: the prompt has the opening marker already. White space around thoughts, and before the answer that
    follows them, belongs to neither.
    """

    def __init__(self, markers: ReasoningFormat, *, is_open: bool) -> None:
        self._begin, self._end = markers.begin, markers.end
        self._held = ""
        self._state = "thoughts" if is_open else "start"
        self._is_trimming = True  # white space that comes next is dropped

    def feed(self, text: str) -> tuple[str, str]:
        """The certain text of thoughts and of the answer."""
        self._held += text
        thoughts = ""
        if self._state == "start":
            self._read_start()
        if self._state == "thoughts":
            thoughts = self._read_thoughts()
        return thoughts, self._read_answer() if self._state == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        if self._state == "thoughts":
            return held.rstrip(), ""
        return "", held.lstrip() if self._state == "answer" and self._is_trimming else held

    def _read_start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._begin):
            self._held, self._state = text.removeprefix(self._begin), "thoughts"
        elif not self._begin.startswith(text):
            self._state, self._is_trimming = "answer", False

    def _read_thoughts(self) -> str:
        if self._is_trimming:
            self._held = self._held.lstrip()
            self._is_trimming = not self._held
        thoughts, end, rest = self._held.partition(self._end)
        if end:
            self._held, self._state, self._is_trimming = rest, "answer", True
            return thoughts.rstrip()
        # White space may come before the end, and what looks like its beginning may be it.
        first = max(0, len(thoughts) - len(self._end) + 1)
        start = next(at for at in range(first, len(thoughts) + 1) if self._end.startswith(thoughts[at:]))
        certain = thoughts[:start].rstrip()
        self._held = self._held[len(certain) :]
        return certain

    def _read_answer(self) -> str:
        if self._is_trimming:
            self._held = self._held.lstrip()
            self._is_trimming = not self._held
        answer, self._held = self._held, ""
        return answer
