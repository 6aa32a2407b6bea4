"""Messages of the first process to the others, as bytes: calls with NumPy arrays and small Python values. Imports no
JAX.

A JSON header, then the arrays' bytes. Only types listed here can be sent, so reading a message runs no code.
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
_ALIGNMENT = 64  # bytes; with it JAX on a CPU uses an array in place


class RemoteArray(NamedTuple):
    """An array on the devices, of which each process has a part: the call that returned it, and its index there."""

    call: int
    leaf: int


class RemoteCall(NamedTuple):
    """A method call on a named object, for every process to make."""

    number: int
    target: str
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    released: tuple[RemoteArray, ...]  # no later call refers to them


def encode(call: RemoteCall, held: Callable[[Any], RemoteArray | None]) -> bytes:
    """The call as bytes. `held`: finds arrays that are on devices. Raises `TypeError` for an argument that can't be
    sent."""
    arrays: list[bytes] = []
    place = 0

    def to_json(value: Any) -> Any:
        nonlocal place
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [to_json(v) for v in value]
        if isinstance(value, tuple):
            kind = type(value).__name__
            if kind != "tuple" and _NAMED.get(kind) is not type(value):
                raise TypeError(f"a {kind} can't be told to other processes: jaxinfer/multi_process/messages.py lists what can")
            return {"tuple": kind, "of": [to_json(v) for v in value]}
        if isinstance(value, dict):
            return {"dict": [[to_json(k), to_json(v)] for k, v in value.items()]}
        if isinstance(value, (np.ndarray, np.generic)):
            contents = np.asarray(value).tobytes()
            start, place = place, place + -(-len(contents) // _ALIGNMENT) * _ALIGNMENT
            arrays.append(contents.ljust(place - start, b"\0"))
            return {"array": str(value.dtype), "shape": value.shape, "at": start}
        if (known := held(value)) is not None:
            return {"held": known}
        raise TypeError(f"a {type(value).__name__} can't be told to other processes: jaxinfer/multi_process/messages.py lists what can")

    header = json.dumps(
        [call.number, call.target, call.method, to_json(list(call.arguments)), to_json(call.keywords), call.released]
    ).encode()
    return b"".join([len(header).to_bytes(_HEADER, "little"), header, *arrays])


def decode(message: bytes, held: Mapping[RemoteArray, Any]) -> RemoteCall:
    """The call from bytes. `held`: this process's arrays."""
    start = _HEADER + int.from_bytes(message[:_HEADER], "little")
    arrays = memoryview(message)[start:]

    def from_json(value: Any) -> Any:
        match value:
            case list():
                return [from_json(v) for v in value]
            case {"tuple": kind, "of": values}:
                return _tuple(kind, map(from_json, values))
            case {"dict": pairs}:
                return {from_json(key): from_json(v) for key, v in pairs}
            case {"array": dtype, "shape": shape, "at": at}:
                # A copy: the device may read the array at any later time.
                return np.frombuffer(arrays, dtype, int(np.prod(shape)), at).reshape(shape).copy()
            case {"held": known}:
                return held[RemoteArray(*known)]
        return value

    number, target, method, arguments, keywords, released = json.loads(message[_HEADER:start])
    return RemoteCall(
        number, target, method, tuple(from_json(arguments)), from_json(keywords), tuple(RemoteArray(*pair) for pair in released)
    )


def _tuple(kind: str, values: Iterator[Any]) -> Any:
    return tuple(values) if kind == "tuple" else _NAMED[kind](*values)
