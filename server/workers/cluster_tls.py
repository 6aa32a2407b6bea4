"""ClusterTls: the certificate that a worker or router shows to the others, and whom it trusts; for calls and pages."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from jaxinfer.config import ConfigError


@dataclass(frozen=True)
class ClusterTls:
    """Paths of PEM files. Every process of a cluster serves some of the others and is served by some, so each has a
    certificate for its address. `is_mutual`: who connects must show one too.

    Raises `ConfigError` for files that can't be read or don't belong together."""

    certificate: str
    key: str
    authority: str
    is_mutual: bool = True

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):
            path = getattr(self, name)
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"cluster_{name} is {path!r}, which can't be read: {error.strerror}") from error
        try:
            self.server_context()
        except ssl.SSLError as error:
            raise ConfigError(
                f"cluster_certificate {self.certificate!r}, cluster_key {self.key!r} and cluster_authority {self.authority!r} don't make "
                f"TLS ({error.reason}): give PEM files, the key that of the certificate"
            ) from error

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> ClusterTls | None:
        """From the flags; None without any. Raises `ConfigError` for some of them without the others."""
        paths = {name: getattr(arguments, f"cluster_{name}") for name in ("certificate", "key", "authority")}
        missing = [name for name, path in paths.items() if path is None]
        if len(missing) == len(paths):
            return None
        if missing:
            raise ConfigError(f"TLS between routers and workers needs --cluster-{' and --cluster-'.join(missing)} too")
        return cls(**paths, is_mutual=arguments.cluster_mutual_tls)

    def server_context(self) -> ssl.SSLContext:
        """For pages that others pull from here."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        context.verify_mode = ssl.CERT_REQUIRED if self.is_mutual else ssl.CERT_NONE
        return context

    def client_context(self) -> ssl.SSLContext:
        """For pages that are pulled from others."""
        context = ssl.create_default_context(cafile=self.authority)
        context.load_cert_chain(self.certificate, self.key)
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self._read(self.authority), self._read(self.key), self._read(self.certificate))

    def server_credentials(self) -> grpc.ServerCredentials:
        pairs = [(self._read(self.key), self._read(self.certificate))]
        return grpc.ssl_server_credentials(pairs, self._read(self.authority) if self.is_mutual else None, self.is_mutual)

    @staticmethod
    def _read(path: str) -> bytes:
        return Path(path).read_bytes()
