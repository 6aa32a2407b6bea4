"""ServerConfig: the settings of the HTTP front. Command-line flags and their help come from the fields here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinfer.config import ConfigError, parse_bytes, size_text
from server.tools.formats import FORMATS, NO_FORMAT
from server.tools.reasoning import REASONING_FORMATS


def _flag(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


def _secret(instead: str, variable: str) -> Any:
    """A field without a flag: every user of a machine sees its command lines."""
    return field(default=(), repr=False, metadata={"instead": f"--{instead.replace('_', '-')} FILE or the environment, {variable}"})


OF_SEVERAL_MODELS = ("models_memory", "models_sleep_level", "models_turn", "models_wait")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _flag(8000, "port to listen on; 0: any free one")
    served_model_name: tuple[str, ...] = _flag((), "model names in the API, the first one reported; default: from --model")
    embedding_truncate: bool = _flag(False, "truncate texts longer than the embedding model's maximum instead of refusing them")
    served_embedding_name: tuple[str, ...] = _flag((), "embedding model names in the API; default: from --embedding-model")
    root_path: str = _flag("", "path prefix of a proxy, such as /llm; requests are accepted with and without it")
    api_keys: tuple[str, ...] = _secret("api_key_file", "JAXINFER_API_KEYS")
    priority_keys: tuple[str, ...] = _secret("priority_key_file", "JAXINFER_PRIORITY_KEYS")
    api_key_file: str | None = _flag(
        None,
        "file of API keys, one a line; clients must send one; reread on SIGHUP; also from JAXINFER_API_KEYS",
    )
    priority_key_file: str | None = _flag(
        None, "file of the API keys that may use priority; default: all of them; also from JAXINFER_PRIORITY_KEYS"
    )
    metrics_key_file: str | None = _flag(None, "file of keys for /metrics and /stats; default: they need none")
    ssl_certfile: str | None = _flag(None, "PEM file of a certificate and its chain, to serve HTTPS; reread on SIGHUP")
    ssl_keyfile: str | None = _flag(None, "PEM file of the certificate's key, if it is not in --ssl-certfile")
    ssl_ca_certs: str | None = _flag(
        None, "PEM file of certificate authorities: clients must present a certificate signed by one of them (mTLS)"
    )
    cors_origins: tuple[str, ...] = _flag((), "allowed CORS origins, such as https://chat.example.com; *: any")
    allowed_hosts: tuple[str, ...] = _flag(
        (),
        "allowed Host headers besides IP addresses, localhost, --host and this machine's name; *.a.org: all subdomains; *: any; "
        "default with API keys: any",
    )
    max_connections: int = _flag(
        1000, "most open connections; beyond it the longest idle one is closed, and if none is idle, requests get 503"
    )
    head_timeout: float = _flag(10.0, "seconds to receive a request's head, from its first byte or from the opening of its connection")
    body_timeout: float = _flag(30.0, "seconds to receive a request's body, and one more for each 4 KiB")
    idle_timeout: float = _flag(75.0, "seconds for which a connection without requests stays open (keep-alive)")
    write_timeout: float = _flag(300.0, "seconds after which a connection is closed if its client reads nothing")
    request_timeout: float | None = _flag(None, "most seconds for a request, whatever timeout it gives; then it is aborted")
    otlp_endpoint: str | None = _flag(None, "collector that traces of requests go to, OTLP over gRPC (extra otel)")
    usage_log: str | None = _flag(None, "file for a JSON line per request: API key's name, tokens, device time")
    max_body_size: str = _flag("4MiB", "largest request body; larger ones get 413 (a body is parsed while nothing else runs)")
    batch_dir: str | None = _flag(None, "folder for /v1/files and /v1/batches, used by one server only; default: both are off")
    max_file_size: str = _flag("200MiB", "largest upload to /v1/files")
    models_memory: str = _flag(
        "auto",
        "with several models: bytes on each device for the weights and KV pages of those that are awake, such as 8GiB; for a model that "
        "sleeps, others are put to sleep; auto: 85% of the device's memory",
    )
    models_sleep_level: int = _flag(
        1, "with several models: 1 keeps the weights of those that sleep in host memory, 2 reads them again to wake them", choices=(1, 2)
    )
    models_turn: float = _flag(
        10.0, "with several models: seconds for which a busy one stays awake though requests wait for another; then it takes no more"
    )
    models_wait: float = _flag(300.0, "with several models: most seconds that a request waits for its model to be awake; then it gets 503")
    weight_control: bool = _flag(False, "serve /v1/models/ID/sleep, /wake and /update_weights, for priority keys where there are some")
    tool_format: str = _flag(
        "auto",
        "format in which the model writes tool calls: from its chat template, none (they stay text), or a name",
        choices=("auto", NO_FORMAT, *FORMATS),
    )
    reasoning_format: str = _flag(
        "auto",
        "markers around the model's thoughts: from its chat template, none (they stay text), or a name",
        choices=("auto", NO_FORMAT, *REASONING_FORMATS),
    )
    strict_parameters: bool = _flag(
        False, "refuse unknown parameters and those without effect; off: those that can't change the answer are ignored and reported"
    )
    max_prompts: int = _flag(128, "most prompts in one completions request")
    watchdog_timeout: float = _flag(300.0, "seconds of one engine iteration after which it counts as hung and /health is 503")
    shutdown_timeout: float = _flag(60.0, "seconds for running requests to finish after SIGTERM")
    log_level: str = _flag("info", "lowest log level", choices=("debug", "info", "warning", "error"))
    log_format: str = _flag("text", "format of log lines: plain text, or a JSON object each", choices=("text", "json"))
    access_log: bool = _flag(True, "log each HTTP request; probes and metrics at level debug only")

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
        for name in ("head_timeout", "body_timeout", "idle_timeout", "write_timeout", "models_turn", "models_wait"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name):g}: give seconds above 0")
        if not self.watchdog_timeout > 0:
            raise ConfigError(f"watchdog_timeout is {self.watchdog_timeout}: give seconds above 0")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout is {self.shutdown_timeout}: give seconds, 0 or more")
        if self.models_memory != "auto":
            object.__setattr__(self, "models_memory", size_text(self.models_memory))
            parse_bytes("models_memory", self.models_memory)
        for name in ("max_body_size", "max_file_size"):
            object.__setattr__(self, name, size_text(getattr(self, name)))
            if parse_bytes(name, getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give at least 1 byte")

    def without_secrets(self) -> ServerConfig:
        """The same without keys, for everything that doesn't need them."""
        return replace(self, api_keys=(), priority_keys=())

    @property
    def max_body_bytes(self) -> int:
        return parse_bytes("max_body_size", self.max_body_size)

    @property
    def max_file_bytes(self) -> int:
        return parse_bytes("max_file_size", self.max_file_size)

    @property
    def models_bytes(self) -> int | None:
        """Bytes on each device for the models that are awake; None: as much as the device has."""
        return None if self.models_memory == "auto" else parse_bytes("models_memory", self.models_memory)

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
        """Every name of the embedding model a client may ask for."""
        return self.served_embedding_name or ("embedding",)
