"""ServerConfig: what the HTTP front needs to know. Command-line flags and their help come from the fields here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinfer.config import ConfigError, parse_bytes, size_text


def _flag(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


def _secret(instead: str, variable: str) -> Any:
    """A field without a flag, for every user of a machine sees its command lines."""
    return field(default=(), repr=False, metadata={"instead": f"--{instead.replace('_', '-')} FILE or the environment, {variable}"})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _flag(8000, "port to listen on; 0: any free one")
    served_model_name: tuple[str, ...] = _flag((), "names clients may ask for, the first one reported; from --model if not given")
    embedding_truncate: bool = _flag(False, "cut texts that are longer than the embedding model takes, instead of refusing them")
    served_embedding_name: tuple[str, ...] = _flag((), "the same of the embedding model; from --embedding-model if not given")
    root_path: str = _flag("", "path below which a proxy serves this, such as /llm; requests are taken with it and without")
    api_keys: tuple[str, ...] = _secret("api_key_file", "JAXINFER_API_KEYS")
    priority_keys: tuple[str, ...] = _secret("priority_key_file", "JAXINFER_PRIORITY_KEYS")
    api_key_file: str | None = _flag(
        None,
        "file of keys, one on each line, of which clients must send one; read again on SIGHUP; also the environment, JAXINFER_API_KEYS",
    )
    priority_key_file: str | None = _flag(
        None, "file of those API keys whose requests may go ahead of others', all if there is none; also from JAXINFER_PRIORITY_KEYS"
    )
    metrics_key_file: str | None = _flag(None, "file of keys of which /metrics and /stats need one; none: they need no key")
    ssl_certfile: str | None = _flag(None, "PEM file of a certificate and its chain: the server speaks HTTPS; read again on SIGHUP")
    ssl_keyfile: str | None = _flag(None, "PEM file of the certificate's key, if it is not in --ssl-certfile")
    ssl_ca_certs: str | None = _flag(None, "PEM file of authorities: clients must show a certificate that one of them signed")
    cors_origins: tuple[str, ...] = _flag(
        (), "origins whose pages may use the server, such as https://chat.example.com; *: those of any website"
    )
    allowed_hosts: tuple[str, ...] = _flag(
        (),
        "names that a request's Host may have, beside addresses, localhost, --host and this machine's; *.a.org: all below it; *: any, "
        "which is so too where there are API keys and no names are given",
    )
    max_connections: int = _flag(
        1000, "connections that may be open; over it the longest idle one is closed, and if none is, requests get 503"
    )
    head_timeout: float = _flag(10.0, "seconds for a request's head to be complete, from its first byte or the opening of its connection")
    body_timeout: float = _flag(30.0, "seconds that a request's body may take, and one more for each 4 KiB of it")
    idle_timeout: float = _flag(75.0, "seconds that a connection may stay open after an answer without another request")
    write_timeout: float = _flag(300.0, "seconds in which a client must take at least a byte of what is sent to it")
    request_timeout: float | None = _flag(None, "most seconds a request may take, whatever its timeout says; then it is given up")
    usage_log: str | None = _flag(None, "file to append a JSON line to for each request: whose it was, its tokens, its device time")
    max_body_size: str = _flag("4MiB", "largest request body, which is read while nothing else runs; above it a request is answered 413")
    batch_dir: str | None = _flag(None, "folder to keep /v1/files and /v1/batches in, one server's alone; none: both are off")
    max_file_size: str = _flag("200MiB", "largest file that may be uploaded to /v1/files")
    strict_parameters: bool = _flag(
        False, "refuse what requests hold that is unknown or has no effect; off: what can't change the answer is ignored and named"
    )
    max_prompts: int = _flag(128, "most prompts in one completions request")
    watchdog_timeout: float = _flag(300.0, "seconds that one iteration of the engine may take before /health is 503: it hangs")
    shutdown_timeout: float = _flag(60.0, "seconds that running requests get to finish after SIGTERM")
    log_level: str = _flag("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = _flag("text", "how log lines are written: for people, or a JSON object each", choices=("text", "json"))
    access_log: bool = _flag(True, "log a line for each HTTP request; those of probes and metrics at the level debug only")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: give one from 0 to 65535")
        if any(not key.strip() for key in self.api_keys + self.priority_keys):
            raise ConfigError("JAXINFER_API_KEYS or JAXINFER_PRIORITY_KEYS has an empty key: give non-empty keys, separated by commas")
        for origin in self.cors_origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(f"cors_origins has {origin!r}: give origins such as https://chat.example.com, without a path, or *")
        for name in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[\w.-]+", name):
                raise ConfigError(f"allowed_hosts has {name!r}: give names such as llm.example.com, without a scheme or a port, or *")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("ssl_certfile is not given, but another file for TLS is: give the certificate's file too")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ConfigError(f"root_path is {self.root_path!r}: give one such as /llm, without a slash at its end")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"request_timeout is {self.request_timeout}: give seconds above 0, or leave it out")
        for setting in ("served_model_name", "served_embedding_name"):
            if any(not name.strip() for name in getattr(self, setting)):
                raise ConfigError(f"{setting} has an empty name: give non-empty names, separated by commas")
        for name in ("max_prompts", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("head_timeout", "body_timeout", "idle_timeout", "write_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name):g}: give seconds above 0")
        if not self.watchdog_timeout > 0:
            raise ConfigError(f"watchdog_timeout is {self.watchdog_timeout}: give seconds above 0")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout}: give seconds, 0 or more")
        for name in ("max_body_size", "max_file_size"):
            object.__setattr__(self, name, size_text(getattr(self, name)))
            if parse_bytes(name, getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give at least 1 byte")

    def without_secrets(self) -> ServerConfig:
        """The same, for all that need no key's text."""
        return replace(self, api_keys=(), priority_keys=())

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
