"""Readers of one section of tool calls, by its layout: see `layout.py`."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.tools.characters import END, Characters, Damaged, Parsing
from server.tools.events import ArgumentText, CallOpened
from server.tools.keywords import read_keywords
from server.tools.layout import CallIndex, Element, JsonArguments, JsonCall, KeywordArguments, Layout, Name, TaggedArguments, WrittenId
from server.tools.tagged import read_tagged
from server.tools.values import read_string, read_value

_ALPHABET = string.ascii_letters + string.digits
_ID_CHARACTERS = frozenset(_ALPHABET)
_MAX_KEY = 64  # characters of JSON
_MAX_INDEX = 9  # digits


@dataclass(frozen=True, slots=True)
class CallRules:
    """What a request allows. `schemas`: the parameters' JSON schema of each tool, by name. `new_id`: a call's id, from
    the format's form, the name and the index as written."""

    schemas: Mapping[str, Mapping[str, Any]]
    new_id: Callable[[str, str, str], str]


def random_id(form: str, name: str, index: str) -> str:
    """A call's id in a `ToolFormat.call_id` form."""
    before, brace, rest = form.partition("{random:")
    if not brace:
        return form.format(name=name, index=index)
    length, _, after = rest.partition("}")
    return before + "".join(secrets.choice(_ALPHABET) for _ in range(int(length))) + after


@dataclass(slots=True)
class SectionReader:
    """Reads one section. `events` are what is certain so far: whoever sends characters takes them away.

    `is_in_new_call`: a call began and is not opened yet.
    """

    layout: Layout
    id_form: str
    rules: CallRules
    text: Characters = field(default_factory=Characters)
    events: list[CallOpened | ArgumentText] = field(default_factory=list)
    is_in_new_call: bool = True
    num_read: int = 0  # whole calls
    _name: str = ""
    _index: str = ""
    _id: str | None = None
    _held: list[str] = field(default_factory=list)  # arguments of a call that isn't opened yet

    def read(self) -> Parsing[None]:
        """The whole section. Raises `Damaged` where the text is something else; what was opened before stays."""
        for number, begin in enumerate(self.layout.begin):
            if number:
                yield from self.text.space()
            yield from self.text.expect(begin)
        while True:
            yield from self._read_call()
            self.num_read += 1
            if self.layout.between is None:
                break
            yield from self.text.space()
            first_end = self.layout.end[0]
            if (yield from self.text.one_of((self.layout.between, first_end))) == first_end:
                break
            self.is_in_new_call = True
        for end in self.layout.end if self.layout.between is None else self.layout.end[1:]:
            yield from self.text.space()
            yield from self.text.expect(end)

    def _read_call(self) -> Parsing[None]:
        self._name, self._index, self._id, self._held = "", "", None, []
        for number, part in enumerate(self.layout.call):
            if number or self.layout.begin:
                yield from self.text.space()
            yield from self._read_part(part)

    def _read_part(self, part: Element) -> Parsing[None]:
        match part:
            case str():
                yield from self.text.expect(part)
            case Name():
                self._name = yield from self.text.longest_of(tuple(self.rules.schemas))
            case CallIndex():
                self._index = yield from self._read_run("0123456789", _MAX_INDEX)
            case WrittenId(length):
                self._id = yield from self._read_run(_ID_CHARACTERS, length)
            case JsonArguments():
                yield from self._read_arguments()
            case JsonCall():
                yield from self._read_json_call(part)
            case KeywordArguments():
                yield from read_keywords(self.text, self._open, self._emit)
            case TaggedArguments():
                yield from read_tagged(self.text, part, self.rules.schemas[self._name], self._open, self._emit)

    def _open(self) -> None:
        """From here on it is a call: its arguments are sent as they come."""
        call_id = self._id or self.rules.new_id(self.id_form, self._name, self._index)
        self.events.append(CallOpened(call_id, self._name))
        self.is_in_new_call = False
        if self._held:
            self.events.append(ArgumentText("".join(self._held)))

    def _emit(self, text: str) -> None:
        if self.is_in_new_call:
            self._held.append(text)
        else:
            self.events.append(ArgumentText(text))

    def _read_run(self, characters: str | frozenset[str], length: int) -> Parsing[str]:
        run = ""
        while len(run) < length and (character := (yield from self.text.peek())) != END and character in characters:
            run += yield from self.text.take()
        if not run:
            raise Damaged
        return run

    def _read_arguments(self) -> Parsing[None]:
        if (yield from self.text.peek()) != "{":
            raise Damaged
        if self._name:
            self._open()
        yield from read_value(self.text, self._emit)

    def _read_json_call(self, part: JsonCall) -> Parsing[None]:
        yield from self.text.expect("{")
        seen: set[str] = set()
        has_arguments = False
        while True:
            yield from self.text.space()
            key = yield from self._read_short_string(_MAX_KEY)
            if key in seen or key not in (part.name, *part.arguments, *part.ignored):
                raise Damaged
            seen.add(key)
            yield from self.text.space()
            yield from self.text.expect(":")
            yield from self.text.space()
            if key == part.name:
                yield from self._read_json_name()
            elif key in part.ignored:
                yield from read_value(self.text, lambda text: None)
            else:
                if has_arguments:
                    raise Damaged
                has_arguments = True
                yield from self._read_json_arguments()
            yield from self.text.space()
            if (yield from self.text.one_of((",", "}"))) == "}":
                break
        if not self._name:
            raise Damaged
        if not has_arguments:
            self._emit("{}")
        if self.is_in_new_call:
            self._open()

    def _read_json_name(self) -> Parsing[None]:
        longest = max(map(len, self.rules.schemas), default=0)
        self._name = yield from self._read_short_string(6 * longest)  # a character's escape has six
        if self._name not in self.rules.schemas:
            raise Damaged
        if self._held:
            self._open()

    def _read_json_arguments(self) -> Parsing[None]:
        """An object, null, or an object as JSON text in a string, as some models write it."""
        first = yield from self.text.peek()
        if first == "{":
            yield from self._read_arguments()
            return
        read: list[str] = []
        yield from read_string(self.text, read.append) if first == '"' else self.text.expect("null")
        if read:
            try:
                written = json.loads("".join(read))
                is_object = isinstance(json.loads(written), dict)
            except (ValueError, RecursionError):
                is_object = False
            if not is_object:
                raise Damaged
        self._emit(written if read else "{}")
        if self._name:
            self._open()

    def _read_short_string(self, length: int) -> Parsing[str]:
        """A JSON string's value. Raises `Damaged` for a longer one, without waiting for its end."""
        read: list[str] = []

        def emit(text: str) -> None:
            read.append(text)
            if len(read) > length + 2:
                raise Damaged

        yield from read_string(self.text, emit)
        value: str = json.loads("".join(read))
        return value
