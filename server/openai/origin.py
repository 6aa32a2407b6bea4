"""Which web pages may use this server. A browser sends requests of any website, also from inside networks that the
website can't reach. So a server without keys answers only to names that no website can point at it, and pages of
another origin change nothing."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from server.config import ServerConfig
from server.openai.caller import SESSION_HEADER
from server.openai.errors import ApiError, quoted

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
PROBES = frozenset({"/health", "/ready", "/ping"})  # of load balancers, which send any Host; they expose nothing
DEFAULT_PORTS = {"http": 80, "https": 443}


def cors_settings(config: ServerConfig) -> dict[str, Any]:
    """Settings of the middleware that tells browsers which pages may read answers."""
    return {
        "allow_origins": config.cors_origins,
        "allow_methods": ("GET", "HEAD", "POST", "DELETE"),
        "allow_headers": ("*",),
        "expose_headers": ("x-request-id", "retry-after", SESSION_HEADER),
    }


class OriginRules:
    """`check` raises `ApiError` 403 for a request that a browser sends for a page that must not."""

    def __init__(self, config: ServerConfig, *, has_keys: bool) -> None:
        self._origins = frozenset(config.cors_origins)
        # A website knows no key, so any Host is accepted where one is needed.
        self._hosts = None if "*" in config.allowed_hosts or (has_keys and not config.allowed_hosts) else _known_hosts(config)

    def check(self, method: str, path: str, headers: Headers) -> None:
        """`path` is that of a route. A client that sends no Host or no Origin is not a browser."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and path not in PROBES and not self._is_own(_without_port(host)):
            name = _without_port(host)
            message = (
                f"the Host is {quoted(host)}, which this server doesn't know as a name of its own: start it with --allowed-hosts "
                f"{name[:80] if name.isascii() and name.isprintable() else 'NAME'}, or with API keys, or call it by its IP address"
            )
            raise ApiError(403, message, code="host_not_allowed", type="permission_error")
        if origin is None or method in SAFE_METHODS or self._origins & {"*", origin}:
            return
        # Only browsers set the latter, and it works behind proxies that change the Host.
        if not _is_same(origin, host) and headers.get("sec-fetch-site") != "same-origin":
            message = (
                f"the Origin is {quoted(origin)}, a page of another server: start this one with --cors-origins and that origin to let it in"
            )
            raise ApiError(403, message, code="origin_not_allowed", type="permission_error")

    def _is_own(self, name: str) -> bool:
        if self._hosts is None or name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return any(known.startswith("*.") and name.endswith(known[1:]) for known in self._hosts)
        return True  # a website can point its own name at any machine, but never an address


def _known_hosts(config: ServerConfig) -> frozenset[str]:
    own = socket.gethostname().lower()
    return frozenset({"localhost", config.host.lower(), own, f"{own}.local", *(name.lower() for name in config.allowed_hosts)})


def _without_port(host: str) -> str:
    """'[::1]:8000' -> '::1', 'Name.:80' -> 'name'."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_same(origin: str, host: str) -> bool:
    try:
        page, own = urlsplit(origin), urlsplit(f"//{host}")
        default = DEFAULT_PORTS.get(page.scheme)
        return page.hostname is not None and (page.hostname, page.port or default) == (own.hostname, own.port or default)
    except ValueError:  # such as a port that is no number
        return False
