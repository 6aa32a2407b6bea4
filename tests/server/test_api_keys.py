"""API keys come from files, are held as digests, change without a restart, and are never on a command line or in a log."""

import gc
import sys
import types

import pytest
from fastapi.testclient import TestClient

from jaxinfer.config import ConfigError
from server import cli
from server.api_keys import KeyRing, tenant_name
from server.config import ServerConfig
from server.openai.app import create_app
from tests.server.scripted_engine import ScriptedEngine

TEXT = {"model": "tiny", "prompt": "Tell", "max_tokens": 4}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst-key\n\n  sécond-key  \n", encoding="utf-8")
    return path


def status(client, key):
    return client.post("/v1/completions", json=TEXT, headers=[(b"authorization", b"Bearer " + key.encode())]).status_code


def test_a_files_keys_are_taken_and_change_on_reload(backend, tokenizer, key_file):
    config = ServerConfig(served_model_name=("tiny",), api_keys=("fixed-key",), api_key_file=str(key_file))
    app = create_app(backend, tokenizer, config)
    with TestClient(app) as client:
        assert [status(client, key) for key in ("first-key", "sécond-key", "fixed-key", "# of the team", "third-key")] == [200] * 3 + [
            401
        ] * 2
        key_file.write_text("third-key\n")
        app.state.key_rings[0].reload()
        assert [status(client, key) for key in ("first-key", "fixed-key", "third-key")] == [401, 200, 200]
    assert [context.tenant for context in backend.contexts][-1] == tenant_name("third-key")


@pytest.mark.parametrize("content", [b"", b"# none\n", b"two keys\n", b"\xff\xfe", None])
def test_a_damaged_file_is_an_error_at_start_and_changes_nothing_later(key_file, caplog, content):
    keys = KeyRing.api_keys(ServerConfig(api_key_file=str(key_file)))
    if content is None:
        key_file.unlink()
    else:
        key_file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"api_key_file is '.*keys'"):
        KeyRing.api_keys(ServerConfig(api_key_file=str(key_file)))
    keys.reload()
    assert keys.find(b"first-key") is not None
    assert "stay in force" in caplog.text and "two keys" not in caplog.text


def test_priority_keys_come_from_a_file_too(key_file, tmp_path):
    priority = tmp_path / "priority"
    priority.write_text("first-key\n")
    config = ServerConfig(api_key_file=str(key_file), priority_key_file=str(priority))
    keys = KeyRing.api_keys(config)
    assert keys.find(b"first-key").may_go_ahead and not keys.find("sécond-key".encode()).may_go_ahead
    assert all(
        KeyRing.api_keys(ServerConfig(api_key_file=str(key_file))).find(key.encode()).may_go_ahead for key in ("first-key", "sécond-key")
    )
    priority.write_text("of-nobody\n")
    with pytest.raises(ConfigError, match="a priority key is not one of the API keys") as error:
        KeyRing.api_keys(config)
    assert "of-nobody" not in str(error.value)


def test_a_key_is_held_as_a_digest_alone(backend, tokenizer, key_file):
    secret = "-".join(("unlike", "any", "other"))
    key_file.write_text(secret)
    config = ServerConfig(api_keys=("fixed-" + secret,), api_key_file=str(key_file))
    assert secret not in repr(config)
    app = create_app(backend, tokenizer, config)
    assert app.state.key_rings[0].find(secret.encode())
    assert not [text for text in texts_within(app) if secret in text]
    assert [text for text in texts_within([config]) if secret in text], "this would find it"


def texts_within(root):
    """Every string that the object leads to, but through modules and classes."""
    seen, todo = {}, [root]
    while todo:
        item = todo.pop()
        if id(item) not in seen and not isinstance(item, type | types.ModuleType):
            seen[id(item)] = item
            is_function = isinstance(item, types.FunctionType)  # whose globals are a module's
            todo += [cell.cell_contents for cell in item.__closure__ or ()] if is_function else gc.get_referents(item)
    return [item for item in seen.values() if isinstance(item, str)]


def test_a_key_on_the_command_line_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["serve", "--api-keys", "secret"])
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert "give --api-key-file FILE or the environment, JAXINFER_API_KEYS" in error and "secret:" not in error


@pytest.mark.parametrize("flag", ["--api-key-file", "--priority-key-file", "--ssl-certfile"])
def test_a_missing_file_is_told_before_the_long_start(monkeypatch, capsys, flag):
    engines = []
    monkeypatch.setitem(sys.modules, "jaxinfer.engine", types.SimpleNamespace(Engine=lambda config: engines.append(ScriptedEngine(config))))
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["serve", "--port", "0", flag, "no/such/file"])
    assert exit_info.value.code == 2
    assert f"{flag[2:].replace('-', '_')} is 'no/such/file': No such file or directory" in capsys.readouterr().err
    assert engines == []
