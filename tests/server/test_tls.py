"""TLS: HTTPS with a pair of files, errors that name the file, and a new certificate without a restart."""

import socket
import ssl
import time
from contextlib import ExitStack, suppress
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


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request, monkeypatch):
    """A connection that becomes TLS's is each loop's own code, and users have either."""
    if request.param == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        monkeypatch.setattr("tests.server.serving.NEW_LOOP", uvloop.new_event_loop)


def opened(url, *sent):
    connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5)
    for data in sent:
        connection.sendall(data)
    return connection


def seconds_until_closed(connection):
    start = time.monotonic()
    with connection:
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
    return time.monotonic() - start


HELLO_BEGUN = bytes.fromhex("160301020001")  # of a client's first message: its kind, its version, a length


def test_a_handshake_that_does_not_come_counts_and_has_its_time(backend, tokenizer, authority, files, loop_kind):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    paths = {"ssl_certfile": files["certificate"], "ssl_keyfile": files["key"]}
    config = ServerConfig(log_level="warning", max_connections=4, head_timeout=0.5, **paths)
    with served(create_app(backend, tokenizer, config), config) as url, ExitStack() as stack:
        for sent in ((), (HELLO_BEGUN,)):
            assert 0.4 < seconds_until_closed(opened(url, *sent)) < 1.5
        assert seconds_until_closed(opened(url, b"GET / HTTP/1.1\r\n\r\n")) < 0.4, "no TLS at all is told at once"
        silent = [stack.enter_context(opened(url)) for _ in range(5)]
        assert serial(url, context)
        assert seconds_until_closed(silent[0]) < 0.2, "the longest silent one makes room"
        for _ in range(5):  # each is counted once, and no more once it is gone
            opened(url).close()
        assert all(serial(url, context) for _ in range(6))


def test_a_request_sent_along_with_the_handshake_is_read(backend, tokenizer, authority, files, loop_kind):
    """The last message of TLS 1.3's handshake is the client's: its request may come in the same packet."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    config = ServerConfig(log_level="warning", ssl_certfile=files["certificate"], ssl_keyfile=files["key"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with served(create_app(backend, tokenizer, config), config) as url, opened(url) as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        client.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        connection.sendall(outgoing.read())
        answer = b""
        while not answer:
            incoming.write(connection.recv(65536))
            with suppress(ssl.SSLWantReadError):  # tickets come first
                answer = client.read(65536)
    assert answer.startswith(b"HTTP/1.1 200")
