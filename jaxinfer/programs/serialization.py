"""Compiled programs as bytes, and back. Their description is JSON. The executable is JAX's pickle, which is read with
an allow-list of JAX's own descriptions."""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import _JaxPjrtUnpickler

_PACKAGES = ("jaxinfer", "pallas_kernels", "sharding")  # whose named tuples programs return
_SIZE = struct.Struct("<I")

# What JAX's pickle of an executable names: classes of these modules, which describe arrays and shardings, and these
# functions.
_MODULES = frozenset(
    f"jax._src.{name}"
    for name in (
        "core",
        "effects",
        "interpreters.pxla",
        "layout",
        "linear_util",
        "mesh",
        "named_sharding",
        "partition_spec",
        "sharding_impls",
        "stages",
    )
) | {"jaxlib._jax", "ml_dtypes"}
_NAMES = frozenset(
    {
        ("jax", "P"),
        ("jax._src.named_sharding", "_unpickle_named_sharding"),
        ("jax._src.partition_spec", "_get_default_unconstrained"),
        ("jax._src.sharding_impls", "_unpickle_gspmd_sharding"),
        ("jax._src.sharding_impls", "_unpickle_single_device_sharding"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "_reconstruct"),
    }
)


class Origin(NamedTuple):
    """What a start needs to know of a program that it doesn't trace."""

    text_key: str  # names the executable in the cache
    out_tree: Any  # PyTreeDef
    custom_calls: Mapping[str, bytes]  # object files by name


def encode_origin(origin: Origin) -> bytes:
    """Raises `TypeError` for a program that returns containers without a plain form."""
    codes = [*origin.custom_calls.values()]
    head = {
        "program": origin.text_key,
        "result": _plain_tree(origin.out_tree),
        "custom_calls": [[name, len(code)] for name, code in origin.custom_calls.items()],
    }
    text = json.dumps(head).encode()
    return b"".join((_SIZE.pack(len(text)), text, *codes))


def decode_origin(data: bytes) -> Origin:
    """Raises some `Exception` for bytes that `encode_origin` didn't write."""
    [size] = _SIZE.unpack_from(data)
    position = _SIZE.size + size
    head = json.loads(data[_SIZE.size : position])
    custom_calls = {}
    for name, length in head["custom_calls"]:
        custom_calls[str(name)] = data[position : position + length]
        position += length
    if position != len(data):
        raise ValueError(f"it has {len(data)} bytes, not {position}")
    return Origin(str(head["program"]), jax.tree.structure(_value_of(head["result"])), custom_calls)


def load_executable(data: bytes, arguments: Sequence[Any], out_tree: Any, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Load what `jax.experimental.serialize_executable.serialize` wrote, as its `deserialize_and_load` does, but with
    an allow-list. `arguments`: positional, of the program. Raises some `Exception` for bytes that don't match."""
    unloaded, args_info, no_kwargs = _Unpickler(io.BytesIO(data), devices[0].client, devices).load()
    of_arguments = jax.tree.unflatten(jax.tree.structure((tuple(arguments), {})), args_info)
    return jax.stages.Compiled(unloaded.load(), [], of_arguments, out_tree, no_kwargs=no_kwargs)


class _Unpickler(_JaxPjrtUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES or (module, name) in _NAMES:
            # A dotted name would lead out of the module.
            found = super().find_class(module, name) if "." not in name else None
            if (module, name) in _NAMES or (isinstance(found, type) and found.__module__ == module):
                return found
        raise ValueError(f"{module}.{name} has no place in a compiled program")


def _plain_tree(tree: Any) -> Any:
    plain = _plain(jax.tree.unflatten(tree, [0] * tree.num_leaves))
    if jax.tree.structure(_value_of(plain)) != tree:
        raise TypeError(f"{tree} has no plain form")
    return plain


def _plain(value: Any) -> Any:
    if value is None or (value == 0 and isinstance(value, int)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"type": f"{type(value).__module__}:{type(value).__qualname__}", "of": [_plain(v) for v in value]}
    if type(value) in (tuple, list):
        return {"type": type(value).__name__, "of": [_plain(v) for v in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"type": "dict", "keys": [*value], "of": [_plain(v) for v in value.values()]}
    raise TypeError(f"{type(value)} has no plain form")


def _value_of(plain: Any) -> Any:
    if plain is None or plain == 0:
        return plain
    values = [_value_of(part) for part in plain["of"]]
    match plain["type"]:
        case "tuple":
            return tuple(values)
        case "list":
            return values
        case "dict":
            return dict(zip(plain["keys"], values, strict=True))
    return _named_tuple(plain["type"])(*values)


def _named_tuple(place: str) -> Any:
    module, _, name = place.partition(":")
    if module.partition(".")[0] in _PACKAGES and "." not in name:
        found = getattr(sys.modules.get(module), name, None)  # imported already by the program's function
        if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
            return found
    raise ValueError(f"{place} is no named tuple of this program's")
