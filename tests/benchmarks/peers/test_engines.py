from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.__main__ import parse_arguments
from benchmarks.peers.engines import ENGINES, MODULES, SERVERS, select_engines
from benchmarks.peers.venvs import PeerUnavailable
from benchmarks.peers.weights import provide_weights
from benchmarks.worker import ROOT


def test_engines_are_chosen_by_how_their_names_begin() -> None:
    assert [e.name for e in select_engines(["jaxinfer-float32", "LLAMA.CPP"])] == ["jaxinfer float32", "llama.cpp Q4_1", "llama.cpp BF16"]
    assert select_engines([]) == list(ENGINES)
    with pytest.raises(ValueError, match=r"no engine is called 'sglang'.*vLLM-bfloat16"):
        select_engines(["sglang"])


def test_every_engine_has_a_worker_and_is_known_by_one_name() -> None:
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)
    for engine in ENGINES:
        assert (ROOT / f"benchmarks/peers/{MODULES[engine.family]}.py").is_file()
        assert engine.family in SERVERS


def test_our_server_runs_with_the_settings_of_our_worker() -> None:
    [engine] = select_engines(["jaxinfer-bfloat16"])
    command = engine.server(Path("/models/a.gguf"), 2, 4096)
    assert command is not None
    words = " ".join(command.command)
    assert "--model /models/a.gguf --dtype bfloat16" in words and "--no-prefix-cache" in words


def test_a_folder_is_no_model_for_llama_cpp(tmp_path: Path) -> None:
    assert provide_weights("folder", tmp_path) == tmp_path
    assert provide_weights("model", tmp_path) == tmp_path
    with pytest.raises(PeerUnavailable, match=r"reads \.gguf files"):
        provide_weights("gguf BF16", tmp_path)


def test_a_wrong_name_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--engines", "sglang"])
    assert "no engine is called 'sglang'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_arguments(["--rounds", "0"])
