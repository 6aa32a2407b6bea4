"""PullSettings: how a worker pulls pages from others."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.config import ConfigError
from jaxinfer.kv_transfer.page_coding import Compression
from jaxinfer.kv_transfer.transport_choice import Transport


@dataclass(frozen=True)
class PullSettings:
    """`has_tls`: whether the cluster's processes show certificates. Raises `ConfigError` for what excludes each
    other."""

    transport: Transport = "socket"
    compression: Compression = "auto"
    has_tls: bool = False

    def __post_init__(self) -> None:
        if self.transport == "jax" and self.has_tls:
            raise ConfigError("kv_transport is jax, which has no TLS: leave the certificates out, or take kv_transport socket")
        if self.transport == "jax" and self.compression == "on":
            raise ConfigError("kv_transport is jax, whose pages can't be coded: take kv_transport socket, or kv_compression auto or off")

    @property
    def may_take_arrays(self) -> bool:
        """Whether pages may come by `jax.experimental.transfer`, and be offered to others so."""
        return self.transport != "socket" and not self.has_tls
