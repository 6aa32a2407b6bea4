"""ServerConfig: what the HTTP front needs to know. Command-line flags and their help come from the fields here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxinfer.config import ConfigError, parse_bytes


def _flag(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _flag(8000, "port to listen on; 0: any free one")
    served_model_name: tuple[str, ...] = _flag((), "names clients may ask for, the first one reported; from --model if not given")
    served_embedding_name: tuple[str, ...] = _flag((), "the same of the embedding model; from --embedding-model if not given")
    api_keys: tuple[str, ...] = _flag((), "keys of which clients must send one; also from the environment, JAXINFER_API_KEYS")
    priority_keys: tuple[str, ...] = _flag(
        (), "those of the API keys whose requests may go ahead of others, all if none is given; also from JAXINFER_PRIORITY_KEYS"
    )
    request_timeout: float | None = _flag(None, "most seconds a request may take, whatever its timeout says; then it is given up")
    usage_log: str | None = _flag(None, "file to append a JSON line to for each request: whose it was, its tokens, its device time")
    max_body_size: str = _flag("32MiB", "largest request body; above it a request is answered 413")
    batch_dir: str | None = _flag(None, "folder to keep /v1/files and /v1/batches in, one server's alone; none: both are off")
    max_file_size: str = _flag("200MiB", "largest file that may be uploaded to /v1/files")
    max_prompts: int = _flag(128, "most prompts in one completions request")
    shutdown_timeout: float = _flag(60.0, "seconds that running requests get to finish after SIGTERM")
    log_level: str = _flag("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    access_log: bool = _flag(False, "log a line for each HTTP request")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: give one from 0 to 65535")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("api_keys has an empty key: give non-empty keys, separated by commas")
        if not set(self.priority_keys) <= set(self.api_keys):
            raise ConfigError("priority_keys has a key that is not one of api_keys: give only such")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"request_timeout is {self.request_timeout}: give seconds above 0, or leave it out")
        for setting in ("served_model_name", "served_embedding_name"):
            if any(not name.strip() for name in getattr(self, setting)):
                raise ConfigError(f"{setting} has an empty name: give non-empty names, separated by commas")
        if self.max_prompts < 1:
            raise ConfigError(f"max_prompts is {self.max_prompts}: it must be at least 1")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout}: give seconds, 0 or more")
        for name in ("max_body_size", "max_file_size"):
            if parse_bytes(name, getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give at least 1 byte")

    @property
    def max_body_bytes(self) -> int:
        return parse_bytes("max_body_size", self.max_body_size)

    @property
    def max_file_bytes(self) -> int:
        return parse_bytes("max_file_size", self.max_file_size)

    @property
    def model_name(self) -> str:
        """The name reported to clients."""
        return self.served_model_name[0] if self.served_model_name else "default"

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name a client may ask for."""
        return self.served_model_name or ("default",)

    @property
    def embedding_names(self) -> tuple[str, ...]:
        """Every name a client may ask for embeddings by."""
        return self.served_embedding_name or ("embedding",)
