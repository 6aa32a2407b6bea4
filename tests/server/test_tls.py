"""TLS: HTTPS with a pair of files, errors that name the file, and a new certificate without a restart."""

import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from jaxinfer.config import ConfigError
from server.config import ServerConfig
from server.openai.app import create_app
from server.tls import PASSWORD_VARIABLE, Tls
from tests.server.serving import served


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def files(authority, tmp_path):
    paths = {name: str(tmp_path / f"{name}.pem") for name in ("certificate", "key", "other")}
    write(authority.issue_cert("127.0.0.1"), paths)
    authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(paths["other"])
    return paths


def write(issued, paths):
    issued.cert_chain_pems[0].write_to_path(paths["certificate"])
    issued.private_key_pem.write_to_path(paths["key"])


def serial(url, context):
    with httpx.Client(verify=context) as client, client.stream("GET", f"{url}/health") as response:
        assert response.status_code == 200
        return response.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()["serialNumber"]


def test_a_pair_of_files_makes_https_and_a_new_pair_is_taken_on_reload(backend, tokenizer, authority, files):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    config = ServerConfig(log_level="warning", ssl_certfile=files["certificate"], ssl_keyfile=files["key"])
    servers = []
    with served(create_app(backend, tokenizer, config), config, servers.append) as url:
        assert url.startswith("https://")
        first = serial(url, context)
        write(authority.issue_cert("127.0.0.1"), files)
        assert serial(url, context) == first
        servers[0].reload()
        second = serial(url, context)
        assert second != first
        Path(files["key"]).write_text("nonsense")
        servers[0].reload()
        assert serial(url, context) == second, "a damaged pair changes nothing"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ssl_certfile": "missing.pem"}, "ssl_certfile is 'missing.pem': No such file or directory; name a PEM file"),
        ({"ssl_keyfile": "missing.pem"}, "ssl_keyfile is 'missing.pem': No such file or directory"),
        ({"ssl_keyfile": "other"}, "it is not the key of the certificate in"),
        ({"ssl_keyfile": None}, "OpenSSL can't load them"),
        ({"ssl_certfile": __file__}, "give PEM files, the certificate first"),
        ({"ssl_ca_certs": __file__}, "ssl_ca_certs is"),
        ({"ssl_certfile": None}, "ssl_certfile is not given, but another file for TLS is"),
    ],
)
def test_files_that_do_not_fit_are_named(files, change, says):
    settings = {"ssl_certfile": files["certificate"], "ssl_keyfile": files["key"]} | change
    settings = {name: files.get(path, path) for name, path in settings.items()}
    with pytest.raises(ConfigError, match=says):
        Tls.of(ServerConfig(**settings))


def test_an_encrypted_key_never_asks_on_the_terminal(files, monkeypatch):
    from cryptography.hazmat.primitives import serialization as pem

    key = pem.load_pem_private_key(Path(files["key"]).read_bytes(), None)
    locked = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"word"))
    Path(files["key"]).write_bytes(locked)
    config = ServerConfig(ssl_certfile=files["certificate"], ssl_keyfile=files["key"])
    with pytest.raises(ConfigError, match=PASSWORD_VARIABLE):
        Tls.of(config)
    monkeypatch.setenv(PASSWORD_VARIABLE, "word")
    assert Tls.of(config) is not None


def test_clients_must_show_a_certificate_where_authorities_are_given(backend, tokenizer, authority, files, tmp_path):
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    config = ServerConfig(
        log_level="warning", ssl_certfile=files["certificate"], ssl_keyfile=files["key"], ssl_ca_certs=str(tmp_path / "ca.pem")
    )
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with served(create_app(backend, tokenizer, config), config) as url:
        with pytest.raises(httpx.TransportError):
            serial(url, context)
        authority.issue_cert("a-client").configure_cert(context)
        serial(url, context)
