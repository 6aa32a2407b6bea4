"""AnswerParser: a model's text, in pieces, becomes thoughts, content and tool calls."""

from __future__ import annotations

from server.tools.events import AnswerEvent, ContentText, ReasoningText
from server.tools.parser import ToolCallParser
from server.tools.reasoning import ReasoningSplitter


class AnswerParser:
    """Call `feed` for each piece of text, then `finish`. Either part may be None: then there are no thoughts, or no
    calls."""

    def __init__(self, splitter: ReasoningSplitter | None, calls: ToolCallParser | None) -> None:
        self._splitter, self._calls = splitter, calls

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def feed(self, text: str) -> list[AnswerEvent]:
        """What is certain after this piece."""
        thoughts, answer = self._splitter.feed(text) if self._splitter is not None else ("", text)
        return self._pieces(thoughts, answer)

    def finish(self) -> list[AnswerEvent]:
        """What was held back, at the end of the text."""
        thoughts, answer = self._splitter.finish() if self._splitter is not None else ("", "")
        return self._pieces(thoughts, answer) + list(self._calls.finish() if self._calls is not None else ())

    def _pieces(self, thoughts: str, answer: str) -> list[AnswerEvent]:
        pieces: list[AnswerEvent] = [ReasoningText(thoughts)] if thoughts else []
        if self._calls is None:
            return pieces + ([ContentText(answer)] if answer else [])
        return pieces + list(self._calls.feed(answer))
