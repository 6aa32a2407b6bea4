"""TLS: the context of --ssl-certfile and --ssl-keyfile, checked at start and reloaded on SIGHUP."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from jaxinfer.config import ConfigError
from server.config import ServerConfig

logger = logging.getLogger(__name__)

# not a flag: a command line is visible to every user of the machine
PASSWORD_VARIABLE = "JAXINFER_SSL_KEYFILE_PASSWORD"


class Tls:
    """The server's certificate. Connections that begin after `reload` use the files' present content.

    Raises `ConfigError` for a file that can't be read, is not PEM, or does not match the other.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    @classmethod
    def of(cls, config: ServerConfig) -> Tls | None:
        """None where the configuration names no certificate."""
        return None if config.ssl_certfile is None else cls(config)

    def reload(self) -> None:
        """Reads the files again. Files that don't match are reported in the log, and the previous certificate stays."""
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a wrong pair must not reach the context in use
            self._load(self.context)
        except ConfigError as error:
            logger.error("the previous certificate stays in force: %s", error)
            return
        logger.info("the certificate was reread")

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        config = self._config
        assert config.ssl_certfile is not None
        for setting in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            _check_readable(setting, getattr(config, setting))
        key = config.ssl_keyfile or config.ssl_certfile
        try:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: os.environ.get(PASSWORD_VARIABLE, ""))
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                message = f"ssl_keyfile is {key!r}: it is not the key of the certificate in {config.ssl_certfile!r}; give a pair"
            else:
                message = (
                    f"ssl_certfile is {config.ssl_certfile!r} and ssl_keyfile {key!r}: OpenSSL can't load them ({error.reason}); give PEM "
                    f"files, the certificate first and its chain after it, and an encrypted key's password in {PASSWORD_VARIABLE}"
                )
            raise ConfigError(message) from error
        if config.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(config.ssl_ca_certs)
            except ssl.SSLError as error:
                message = f"ssl_ca_certs is {config.ssl_ca_certs!r}: OpenSSL can't load it ({error.reason}); give a PEM file"
                raise ConfigError(message) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _check_readable(setting: str, path: str | None) -> None:
    if path is None:
        return
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ConfigError(f"{setting} is {path!r}: {error.strerror}; name a PEM file that this user can read") from error
