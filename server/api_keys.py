"""The server's API keys: read from files and the environment, stored as digests, compared in constant time, reloaded on
SIGHUP."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.config import ConfigError
from server.config import ServerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is stored of a key once it is read: never the key."""

    tenant: str
    may_go_ahead: bool  # whether its requests may have a priority before the default


def tenant_name(key: str) -> str:
    """An API key's name in metrics and logs: always the same, and it doesn't reveal the key."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


class KeyRing:
    """The keys of which a request must send one: those of a file, and fixed ones. `reload` reads the files again.

    Raises `ConfigError`, which names the setting, for a file that can't be read or holds no key, and for a priority key
    that is not among the keys.
    """

    def __init__(self, setting: str, file: str | None, fixed: Iterable[str] = ()) -> None:
        self._pepper = secrets.token_bytes(32)  # digests in memory are useless elsewhere
        self._setting, self._file = setting, file
        self._fixed = {self._digest(key): tenant_name(key) for key in fixed}
        self._priority_file: str | None = None
        self._fixed_priority: frozenset[bytes] = frozenset()
        self._keys: dict[bytes, ApiKey] = {}

    @classmethod
    def api_keys(cls, config: ServerConfig) -> KeyRing:
        """The keys of /v1/."""
        ring = cls("api_key_file", config.api_key_file, config.api_keys)
        ring._priority_file, ring._fixed_priority = config.priority_key_file, frozenset(map(ring._digest, config.priority_keys))
        ring._keys = ring._read()
        return ring

    @classmethod
    def metrics_keys(cls, config: ServerConfig) -> KeyRing:
        """The keys of /metrics."""
        ring = cls("metrics_key_file", config.metrics_key_file)
        ring._keys = ring._read()
        return ring

    @property
    def tenants(self) -> list[str]:
        """A name for each key."""
        return [key.tenant for key in self._keys.values()]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, sent: bytes) -> ApiKey | None:
        """The key with these bytes. Compares with every key, whichever matches."""
        digest = self._digest(sent)
        found = None
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def reload(self) -> None:
        """Reads the files again. Keys that can't be read, or none at all, are reported in the log, and the previous
        keys remain valid."""
        if self._file is None:
            return
        try:
            keys = self._read()
        except ConfigError as error:
            logger.error("the previous API keys stay in force: %s", error)
            return
        num_new, num_gone = len(keys.keys() - self._keys.keys()), len(self._keys.keys() - keys.keys())
        self._keys = keys
        logger.info("%s was reread: %d keys in force, %d of them new, %d removed", self._setting, len(keys), num_new, num_gone)

    def _read(self) -> dict[bytes, ApiKey]:
        tenants, priority = dict(self._fixed), set(self._fixed_priority)
        if self._file is not None:
            tenants |= {self._digest(key): tenant_name(key) for key in _read_keys(self._setting, self._file)}
        if self._priority_file is not None:
            priority |= {self._digest(key) for key in _read_keys("priority_key_file", self._priority_file)}
        if not priority <= tenants.keys():
            raise ConfigError("a priority key is not one of the API keys: give each in both places, or no priority keys")
        return {digest: ApiKey(tenant, not priority or digest in priority) for digest, tenant in tenants.items()}

    def _digest(self, key: str | bytes) -> bytes:
        return hashlib.blake2b(key.encode() if isinstance(key, str) else key, key=self._pepper, digest_size=32).digest()


def _read_lines(setting: str, path: str) -> list[str]:
    """A file's lines that are neither empty nor a comment. Raises `ConfigError` that names `setting` and quotes nothing
    from the file."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{setting} is {path!r}: {reason}; name a text file with a key on each line") from error
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _read_keys(setting: str, path: str) -> Iterable[str]:
    keys = _read_lines(setting, path)
    if not keys:
        raise ConfigError(f"{setting} is {path!r}: it holds no key; write one on each line")
    for number, key in enumerate(keys, 1):
        if any(character.isspace() for character in key):
            raise ConfigError(f"{setting} is {path!r}: key number {number} has a space in it; write one key on each line")
    return keys
