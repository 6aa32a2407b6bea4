"""How a body's names are read: what cannot change the answer is ignored and named, what would change it is refused."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jaxinfer.request import RequestError

logger = logging.getLogger(__name__)


HEADER = "x-jaxinfer-ignored-parameters"
MAX_NAMES = 16  # noted of one body
MAX_NAME = 64  # characters of one
MAX_LOGGED = 256  # names in one process
_SIMILAR = 0.85  # from which an unknown name is taken for a misspelt one
_ODD = re.compile(r"[^\w.$\[\]-]", re.ASCII)


@dataclass(slots=True)
class Reading:
    """What the reading of one body has found; pydantic hands it to each object's model as its context.

    `is_strict`: unknown names are errors. `ignored` are the names that were left out, such as 'messages[].parsed'."""

    is_strict: bool = True
    ignored: dict[str, None] = field(default_factory=dict)  # a set that keeps its order
    refusals: list[RequestError] = field(default_factory=list)  # of the outermost object: told together with its other faults
    num_unknown: int = 0

    def ignore(self, place: str, name: str) -> None:
        """Note a name that is left out. What a client invents has no room to grow."""
        if len(self.ignored) < MAX_NAMES:
            self.ignored[_ODD.sub("?", f"{place}.{name}"[-MAX_NAME:] if place else name[:MAX_NAME])] = None

    def is_worth_a_look(self) -> bool:
        """Whether one more unknown name is compared with the known ones, which takes long."""
        self.num_unknown += 1
        return self.num_unknown <= MAX_NAMES

    @property
    def header(self) -> str:
        """The response header's value; empty where nothing was ignored."""
        return ", ".join(self.ignored)


class IgnoredLog:
    """Logs each ignored name once in a process, and `MAX_LOGGED` of them at most."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning("requests have the parameter %s, which is ignored: it has no effect on answers here (told once)", name)


IGNORED = IgnoredLog()


def not_implemented(names: Sequence[str]) -> RequestError:
    """The error about parameters that would change the answer if this server knew them."""
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    is_are, it_them = ("is", "it") if len(names) == 1 else ("are", "them")
    return RequestError(f"{listed} {is_are} not implemented by this server: leave {it_them} out", names[0], "unsupported_parameter")


def meant(name: str, known: Collection[str], reading: Reading) -> str | None:
    """The known name that an unknown one is likely meant to be. Ignoring it would change the answer."""
    if len(name) > MAX_NAME or not reading.is_worth_a_look():
        return None
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)), None)
