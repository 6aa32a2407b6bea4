"""ToolCallParser: a model's text, in pieces, becomes content and tool calls."""

from __future__ import annotations

from server.tools.calls import CallRules, SectionReader
from server.tools.characters import END, Damaged, Parsing
from server.tools.events import ArgumentText, CallOpened, ContentText
from server.tools.layout import ToolFormat

Event = ContentText | CallOpened | ArgumentText


class ToolCallParser:
    """Call `feed` for each piece of text, then `finish`. The events' joined texts don't depend on the pieces.

    Text is content until a call is certain: it names one of the request's tools and its arguments begin. Until then it
    is held back, and what turns out to be no call is content as it was written. From then on the arguments are sent as
    they come; where they break off, the call keeps what was written of them (no JSON, so that nobody runs it) and the
    rest is content. White space before a call is no content.
    """

    def __init__(self, tool_format: ToolFormat, rules: CallRules, max_calls: int | None = None) -> None:
        self._format, self._rules = tool_format, rules
        self._num_left = max_calls
        self._attempts: list[_Attempt] = []
        self._held: list[str] = []  # characters since the last event or call
        self._space = ""
        self._is_at_start = True  # nothing but white space and calls came so far
        self._marked = [layout for layout in tool_format.layouts if layout.is_marked]
        self._first_characters = {layout.begin[0][0] for layout in self._marked}
        self._events: list[Event] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """What is certain after this piece; often nothing."""
        for character in text:
            self._step(character)
        return self._taken()

    def finish(self) -> list[Event]:
        """What was held back, at the end of the text."""
        if self._attempts:
            self._advance(END)
        if self._space and not self.num_calls:
            self._add(ContentText(self._space))
        self._space = ""
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _step(self, character: str) -> None:
        if self._attempts:
            self._advance(character)
        elif character.isspace():
            self._space += character
        elif self._is_at_start or character in self._first_characters:
            layouts = self._format.layouts if self._is_at_start else self._marked
            self._attempts = [_Attempt(SectionReader(layout, self._format.call_id, self._rules)) for layout in layouts]
            self._advance(character)
        else:
            self._add_content(character)

    def _advance(self, character: str) -> None:
        """Sends one character to the sections that it may be of."""
        alive = [attempt for attempt in self._attempts if attempt.send(character)]
        certain = next((attempt for attempt in self._attempts if attempt.section.events or attempt.is_opened), None)
        if certain is not None:
            self._attempts = [certain]
            if certain.section.events:
                self._take_events(certain)
                self._held = []
            elif certain in alive or certain.is_read:
                self._held.append(character)
            if certain.section.num_read > certain.num_read:  # what closes a call is no text, whatever follows
                certain.num_read, self._held = certain.section.num_read, []
            if certain in alive:
                return
            self._end_section(certain, character)
        elif alive:
            self._attempts = alive
            self._held.append(character)
        else:
            self._attempts = []
            self._release(character)

    def _take_events(self, attempt: _Attempt) -> None:
        attempt.is_opened = True
        for event in attempt.section.events:
            if isinstance(event, CallOpened):
                self.num_calls += 1
                self._space = ""
            if self._num_left is None or self.num_calls <= self._num_left:
                self._add(event)
        attempt.section.events.clear()

    def _end_section(self, attempt: _Attempt, character: str) -> None:
        """After its last call, or where it is damaged."""
        self._attempts = []
        self._is_at_start = True
        if attempt.is_read or (character == END and not attempt.section.is_in_new_call):
            self._held = []
            if attempt.section.text.has_ahead and character != END:
                self._step(character)
        else:
            self._release(character)

    def _release(self, character: str) -> None:
        """What was held back is no call."""
        held, self._held = "".join(self._held), []
        if not held and character != END:
            self._add_content(character)  # it begins nothing
            return
        if held:
            self._add_content(held)
        if character != END:
            self._step(character)

    def _add_content(self, text: str) -> None:
        self._is_at_start = False
        self._add(ContentText(self._space + text))
        self._space = ""

    def _add(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, ContentText) and isinstance(last, ContentText):
            self._events[-1] = ContentText(last.text + event.text)
        elif isinstance(event, ArgumentText) and isinstance(last, ArgumentText):
            self._events[-1] = ArgumentText(last.text + event.text)
        else:
            self._events.append(event)


class _Attempt:
    """A section that is being read, or isn't one."""

    def __init__(self, section: SectionReader) -> None:
        self.section = section
        self.is_opened = False  # it has a call
        self.is_read = False
        self.num_read = 0  # whole calls of it
        self._reading: Parsing[None] = section.read()
        next(self._reading)

    def send(self, character: str) -> bool:
        """Whether it goes on after this character."""
        try:
            self._reading.send(character)
        except StopIteration:
            self.is_read = True
            return False
        except Damaged:
            return False
        return True
