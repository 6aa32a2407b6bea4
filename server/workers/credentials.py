"""Who may talk to workers and routers: a shared token, or TLS with certificates on both sides."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from jaxinfer.config import ConfigError
from server.workers.cluster_tls import ClusterTls

TOKEN_KEY = "x-jaxinfer-token"

# A peer that is gone, or stopped, is noticed within ten seconds whatever the connection does.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True)
class Credentials:
    """`token`: the same for all of a cluster. Without it, and without certificates on both sides, loopback only."""

    token: str = ""
    tls: ClusterTls | None = None

    def check_address(self, flag: str, host: str) -> None:
        """Raises `ConfigError` for an address that others can reach while nobody has to prove anything."""
        if not self.token and not (self.tls is not None and self.tls.is_mutual) and not _is_loopback(host):
            raise ConfigError(
                f"{flag} is {host}, which other machines can reach: set JAXINFER_WORKER_TOKEN to the same secret on all of them, or give each "
                "a certificate (--cluster-certificate)"
            )

    @property
    def page_server_tls(self) -> ssl.SSLContext | None:
        """For pages that others pull from here."""
        return None if self.tls is None else self.tls.server_context()

    @property
    def page_client_tls(self) -> ssl.SSLContext | None:
        """For pages that are pulled from others."""
        return None if self.tls is None else self.tls.client_context()

    def channel(self, address: str) -> grpc.aio.Channel:
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=KEEPALIVE)
        return grpc.aio.secure_channel(address, self.tls.channel_credentials(), options=KEEPALIVE)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Its port. Raises `RuntimeError` for an address that can't be listened on."""
        if self.tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self.tls.server_credentials()))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call."""
        return ((TOKEN_KEY, self.token),) if self.token else ()

    def server(self) -> grpc.aio.Server:
        return grpc.aio.server(options=KEEPALIVE, interceptors=[_TokenCheck(self.token)] if self.token else [])


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        given = dict(details.invocation_metadata).get(TOKEN_KEY, "")
        handler = await continuation(details)
        if hmac.compare_digest(given.encode(), self._token.encode()) or handler is None:
            return handler

        async def refuse(request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token: give workers and routers the same JAXINFER_WORKER_TOKEN")

        async def refuse_stream(request: Any, context: Any) -> Any:
            await refuse(request, context)
            yield

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse_stream, handler.request_deserializer, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(refuse, handler.request_deserializer, handler.response_serializer)


def _is_loopback(host: str) -> bool:
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
        return all(ipaddress.ip_address(address).is_loopback for address in found)
    except (OSError, ValueError):
        return False
