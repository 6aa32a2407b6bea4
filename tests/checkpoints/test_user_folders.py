"""Where what is fetched and compiled is kept, for users with a home and without one."""

import os
import pwd
import tempfile
from pathlib import Path

import jax
import pytest

from checkpoints import user_folders
from checkpoints.hub import cache_dir
from checkpoints.user_folders import cache_folder, expand
from jaxinfer.planner.target import calibration_path
from jaxinfer.programs.compilation import use_persistent_cache


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """A user with neither HOME nor a passwd entry, whose temporary folder is the one returned."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    user_folders._temporary_cache.cache_clear()
    yield tmp_path
    user_folders._temporary_cache.cache_clear()


def test_a_user_without_a_home_has_a_private_cache_beside_temporary_files_and_is_told_so_once(nobody, caplog):
    folder = nobody / f"jaxinfer-{os.getuid()}"
    assert cache_dir() == folder / "models"
    assert calibration_path("cpu") == folder / "hardware" / "cpu.json"
    kept = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert use_persistent_cache() == folder / "xla"
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
    assert folder.stat().st_mode & 0o777 == 0o700
    (warning,) = caplog.messages
    assert f"kept in {folder}; set XDG_CACHE_HOME" in warning


def test_a_temporary_cache_that_others_could_read_is_closed_to_them(nobody):
    (nobody / f"jaxinfer-{os.getuid()}").mkdir(mode=0o777)
    assert cache_folder().stat().st_mode & 0o777 == 0o700


def test_a_temporary_cache_that_another_laid_out_is_not_used(nobody):
    (nobody / "elsewhere").mkdir()
    (nobody / f"jaxinfer-{os.getuid()}").symlink_to(nobody / "elsewhere")
    with pytest.raises(PermissionError, match="is not a folder of this user's, so nothing can be kept there: set XDG_CACHE_HOME"):
        cache_folder()


def test_a_home_that_cannot_be_written_to_is_none(nobody, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs the tests may be allowed everything
    assert cache_folder() == nobody / f"jaxinfer-{os.getuid()}"


def test_a_home_and_a_folder_that_was_asked_for_come_first(nobody, monkeypatch):
    monkeypatch.setenv("HOME", str(nobody / "home"))
    assert cache_folder() == nobody / "home/.cache/jaxinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/jaxinfer")


def test_a_path_with_a_tilde_is_only_a_path_for_a_user_without_a_home(nobody, monkeypatch):
    assert expand("~/model") == Path("~/model")
    monkeypatch.setenv("HOME", "/home/me")
    assert expand("~/model") == Path("/home/me/model")
