"""How a body's parameter names are read: names that cannot change the answer are ignored and reported, others are
refused."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jaxinfer.request import RequestError

logger = logging.getLogger(__name__)


HEADER = "x-jaxinfer-ignored-parameters"
MAX_NAMES = 16  # reported for one body
MAX_NAME = 64  # characters of one
MAX_LOGGED = 256  # names in one process
_SIMILAR = 0.85  # similarity from which an unknown name counts as misspelt
_ODD = re.compile(r"[^\w.$\[\]-]", re.ASCII)


@dataclass(slots=True)
class ParameterPolicy:
    """The policy for one body's names, and what it has found; pydantic passes it to each object's model as its context.

    `is_strict`: unknown names are errors. `ignored` are the names that were ignored, such as 'messages[].parsed'.
    """

    is_strict: bool = True
    ignored: dict[str, None] = field(default_factory=dict)  # an ordered set
    # of the outermost object: reported together with its other faults
    refusals: list[RequestError] = field(default_factory=list)
    num_unknown: int = 0

    def ignore(self, place: str, name: str) -> None:
        """Records an ignored name. The number and length of a client's names are limited."""
        if len(self.ignored) < MAX_NAMES:
            self.ignored[_ODD.sub("?", f"{place}.{name}"[-MAX_NAME:] if place else name[:MAX_NAME])] = None

    def may_compare_name(self) -> bool:
        """Whether one more unknown name may be compared with the known ones, which is slow."""
        self.num_unknown += 1
        return self.num_unknown <= MAX_NAMES

    @property
    def header(self) -> str:
        """The response header's value; empty where nothing was ignored."""
        return ", ".join(self.ignored)


class IgnoredLog:
    """Logs each ignored name once in a process, and at most `MAX_LOGGED` of them."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning("requests have the parameter %s, which is ignored: it has no effect on answers here (told once)", name)


IGNORED = IgnoredLog()


def not_implemented(names: Sequence[str]) -> RequestError:
    """The error about parameters that would change the answer if this server implemented them."""
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    is_are, it_them = ("is", "it") if len(names) == 1 else ("are", "them")
    return RequestError(f"{listed} {is_are} not implemented by this server: leave {it_them} out", names[0], "unsupported_parameter")


def closest_known_name(name: str, known: Collection[str], policy: ParameterPolicy) -> str | None:
    """The known name that an unknown one probably means. Ignoring it would change the answer."""
    if len(name) > MAX_NAME or not policy.may_compare_name():
        return None
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SIMILAR)), None)
