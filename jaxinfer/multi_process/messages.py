"""What the first process tells the others, as bytes: calls with NumPy arrays and small Python values. Imports no JAX.

A JSON header, then the arrays' bytes. Only what is listed here can be said: nothing that is read makes code run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.decode.batch import DecodeBatch
from jaxinfer.prefill.batch import PackedTokens, PrefillBatch
from jaxinfer.sampling.params import SamplingRows

_NAMED: dict[str, Any] = {kind.__name__: kind for kind in (DecodeBatch, PackedTokens, PrefillBatch, SamplingRows)}
_HEADER = 4  # bytes of the header's length
_ALIGNMENT = 64  # bytes; so aligned, JAX on a CPU takes an array where it is


class RemoteArray(NamedTuple):
    """An array on the devices, that each process has its part of: what call it came from, and which of that call's arrays it is."""

    call: int
    leaf: int


class Call(NamedTuple):
    """A method of a named object, for every process to call."""

    number: int
    target: str
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    released: tuple[RemoteArray, ...]  # that nobody will name again


def encode(call: Call, held: Callable[[Any], RemoteArray | None]) -> bytes:
    """The call's bytes. `held` knows the arrays that lie on devices. Raises `TypeError` for an argument that can't be said."""
    arrays: list[bytes] = []
    place = 0

    def said(value: Any) -> Any:
        nonlocal place
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [said(v) for v in value]
        if isinstance(value, tuple):
            kind = type(value).__name__
            if kind != "tuple" and _NAMED.get(kind) is not type(value):
                raise TypeError(f"a {kind} can't be told to other processes: jaxinfer/multi_process/messages.py lists what can")
            return {"tuple": kind, "of": [said(v) for v in value]}
        if isinstance(value, dict):
            return {"dict": [[said(k), said(v)] for k, v in value.items()]}
        if isinstance(value, (np.ndarray, np.generic)):
            contents = np.asarray(value).tobytes()
            start, place = place, place + -(-len(contents) // _ALIGNMENT) * _ALIGNMENT
            arrays.append(contents.ljust(place - start, b"\0"))
            return {"array": str(value.dtype), "shape": value.shape, "at": start}
        if (known := held(value)) is not None:
            return {"held": known}
        raise TypeError(f"a {type(value).__name__} can't be told to other processes: jaxinfer/multi_process/messages.py lists what can")

    header = json.dumps([call.number, call.target, call.method, said(list(call.arguments)), said(call.keywords), call.released]).encode()
    return b"".join([len(header).to_bytes(_HEADER, "little"), header, *arrays])


def decode(message: bytes, held: Mapping[RemoteArray, Any]) -> Call:
    """The call that was encoded, with this process's arrays for those that are held."""
    start = _HEADER + int.from_bytes(message[:_HEADER], "little")
    arrays = memoryview(message)[start:]

    def meant(value: Any) -> Any:
        match value:
            case list():
                return [meant(v) for v in value]
            case {"tuple": kind, "of": values}:
                return _tuple(kind, map(meant, values))
            case {"dict": pairs}:
                return {meant(key): meant(v) for key, v in pairs}
            case {"array": dtype, "shape": shape, "at": at}:
                # A copy: of a view nobody knows how long the device goes on reading it.
                return np.frombuffer(arrays, dtype, int(np.prod(shape)), at).reshape(shape).copy()
            case {"held": known}:
                return held[RemoteArray(*known)]
        return value

    number, target, method, arguments, keywords, released = json.loads(message[_HEADER:start])
    return Call(number, target, method, tuple(meant(arguments)), meant(keywords), tuple(RemoteArray(*pair) for pair in released))


def _tuple(kind: str, values: Iterator[Any]) -> Any:
    return tuple(values) if kind == "tuple" else _NAMED[kind](*values)
