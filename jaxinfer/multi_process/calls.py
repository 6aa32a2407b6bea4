"""Calls of one process repeated by all others: recorded in the first process, replayed in the same order."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from inspect import isfunction
from typing import Any, TypeVar, cast

import jax

from jaxinfer.multi_process.messages import RemoteArray, RemoteCall, decode, encode

T = TypeVar("T")


def public_methods(kind: type) -> list[str]:
    """Names of a class's public methods, without properties."""
    names = {name for base in kind.__mro__ for name, value in vars(base).items() if isfunction(value) and not name.startswith("_")}
    return sorted(names)


class Recorder:
    """Announces each call of a target's public methods before making it, from one thread. Later calls refer to an array
    that a call returned by the call's number. Once the program has dropped the array, the other processes drop
    theirs."""

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        self._tell = tell
        self._is_on = False
        self._numbers = itertools.count()
        self._held: dict[int, RemoteArray] = {}  # by the array's id
        self._alive: dict[RemoteArray, weakref.ref[jax.Array]] = {}
        self._released: deque[RemoteArray] = deque()

    def start(self) -> None:
        """Announce calls from now on."""
        self._is_on = True

    def record(self, name: str, target: T) -> T:
        """The target, with its calls announced by this name."""
        return cast(T, _Recorded(target, partial(self._call, name)))

    def _call(self, target: str, method: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if not self._is_on:
            return function(*arguments, **keywords)
        number = next(self._numbers)
        released = tuple(self._released.popleft() for _ in range(len(self._released)))
        self._tell(encode(RemoteCall(number, target, method, arguments, keywords, released), self._find))
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
        if self._held.get(key) == held:  # otherwise a later call returned the same array
            del self._held[key]
        self._released.append(held)


class _Recorded:
    """Proxy of a target, with its public methods wrapped."""

    def __init__(self, target: Any, call: Callable[..., Any]) -> None:
        self._target = target
        for method in public_methods(type(target)):
            setattr(self, method, partial(call, method, getattr(target, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class Replayer:
    """Repeats the calls of a `Recorder` on this process's own targets."""

    def __init__(self) -> None:
        self._targets: dict[str, Any] = {}
        self._held: dict[RemoteArray, jax.Array] = {}

    def add(self, name: str, target: object) -> None:
        """Register this process's target of a name."""
        self._targets[name] = target

    def make(self, message: bytes) -> None:
        """Make one call. Raises `ValueError` for a target or method that this process doesn't have."""
        call = decode(message, self._held)
        target = self._targets.get(call.target)
        if target is None or call.method not in public_methods(type(target)):
            raise ValueError(f"the leader calls {call.target}.{call.method}, which this process does not have")
        result = getattr(target, call.method)(*call.arguments, **call.keywords)
        for leaf, array in enumerate(jax.tree.leaves(result)):
            if isinstance(array, jax.Array):
                self._held[RemoteArray(call.number, leaf)] = array
        for held in call.released:
            self._held.pop(held, None)
