"""Content sealed with a key (HMAC-SHA256), under a name: no file can stand for another, and none can be changed.
Imports no JAX."""

from __future__ import annotations

import hmac
import zlib

_MAGIC = b"jaxinfer sealed2"  # the digit is the format's version
_DIGEST, _DIGEST_SIZE = "sha256", 32
_OLD_MAGIC = b"\x78"  # zlib's: files of the first format had no header


def seal(key: bytes, name: str, content: bytes) -> bytes:
    """The file of this name with this content, compressed."""
    packed = zlib.compress(content, 1)
    return b"".join((_MAGIC, _digest(key, name, packed), packed))


def unseal(key: bytes, name: str, sealed: bytes) -> bytes | None:
    """A file's content; None if it is of an earlier format. Raises `ValueError` if it does not match its seal."""
    if sealed.startswith(_OLD_MAGIC):
        return None
    head = len(_MAGIC) + _DIGEST_SIZE
    if not sealed.startswith(_MAGIC) or not hmac.compare_digest(sealed[len(_MAGIC) : head], _digest(key, name, sealed[head:])):
        raise ValueError("its content does not match its seal: it was damaged, or written by another user")
    return zlib.decompress(sealed[head:])


def _digest(key: bytes, name: str, packed: bytes) -> bytes:
    digest = hmac.new(key, name.encode() + b"\0", _DIGEST)
    digest.update(packed)
    return digest.digest()
