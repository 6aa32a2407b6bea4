"""One process's calls, made by all: recorded where they are made first, and made again in the others, in the same order."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from inspect import isfunction
from typing import Any, TypeVar, cast

import jax

from jaxinfer.multi_process.messages import Call, RemoteArray, decode, encode

Target = TypeVar("Target")


def public_methods(kind: type) -> list[str]:
    """Names of a class's methods; of what is computed from its state (properties) none."""
    names = {name for base in kind.__mro__ for name, value in vars(base).items() if isfunction(value) and not name.startswith("_")}
    return sorted(names)


class Recorder:
    """Tells of each call of a target's public methods before it is made, from one thread. An array that such a call returned is named in
    later ones by the call's number; once the program has let go of it, the others are told to do so too."""

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        self._tell = tell
        self._is_on = False
        self._numbers = itertools.count()
        self._held: dict[int, RemoteArray] = {}  # by the array's id
        self._alive: dict[RemoteArray, weakref.ref[jax.Array]] = {}
        self._released: deque[RemoteArray] = deque()

    def start(self) -> None:
        """From now on calls are told of."""
        self._is_on = True

    def record(self, name: str, target: Target) -> Target:
        """The target, with calls that are told of by this name."""
        return cast(Target, _Recorded(target, partial(self._call, name)))

    def _call(self, target: str, method: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if not self._is_on:
            return function(*arguments, **keywords)
        number = next(self._numbers)
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        self._tell(encode(Call(number, target, method, arguments, keywords, released), self._find))
        result = function(*arguments, **keywords)
        for leaf, array in enumerate(jax.tree.leaves(result)):
            if isinstance(array, jax.Array):
                self._hold(RemoteArray(number, leaf), array)
        return result

    def _find(self, value: Any) -> RemoteArray | None:
        return self._held.get(id(value)) if isinstance(value, jax.Array) else None

    def _hold(self, held: RemoteArray, array: jax.Array) -> None:
        self._held[id(array)] = held
        self._alive[held] = weakref.ref(array, partial(self._release, held, id(array)))

    def _release(self, held: RemoteArray, key: int, _: object) -> None:
        del self._alive[held]
        if self._held.get(key) == held:  # else a later call returned the same array
            del self._held[key]
        self._released.append(held)


class _Recorded:
    """Stands for a target; what isn't a public method of it is its own."""

    def __init__(self, target: Any, call: Callable[..., Any]) -> None:
        self._target = target
        for method in public_methods(type(target)):
            setattr(self, method, partial(call, method, getattr(target, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class Replayer:
    """Makes the calls that a `Recorder` told of, on this process's own targets."""

    def __init__(self) -> None:
        self._targets: dict[str, Any] = {}
        self._held: dict[RemoteArray, jax.Array] = {}

    def add(self, name: str, target: object) -> None:
        """What a name stands for here."""
        self._targets[name] = target

    def make(self, message: bytes) -> None:
        """Make one call. Raises `ValueError` for one of a target or method that is not here."""
        call = decode(message, self._held)
        target = self._targets.get(call.target)
        if target is None or call.method not in public_methods(type(target)):
            raise ValueError(f"told to call {call.target}.{call.method}, which this process does not have")
        result = getattr(target, call.method)(*call.arguments, **call.keywords)
        for leaf, array in enumerate(jax.tree.leaves(result)):
            if isinstance(array, jax.Array):
                self._held[RemoteArray(call.number, leaf)] = array
        for held in call.released:
            self._held.pop(held, None)
