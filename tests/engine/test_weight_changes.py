"""Weights replaced, put to sleep and woken in a running engine: tokens afterwards are those of a fresh engine."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.array_source import ArraySource
from checkpoints.source import CheckpointError
from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ConfigError
from jaxinfer.engine import Engine
from jaxinfer.programs.compilation import TOTAL
from jaxinfer.request import RequestError
from tests import tiny_model
from tests.conftest import TINY
from tests.engine.workload import workload

PROMPTS, _ = workload()
SMALL = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (64,), "prefill_chunk_size": 64, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True, presence_penalty=0.5)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one device, tiers": {"kv_host_memory": "1MiB", "kv_memory": "64KiB"},
    "tp=2 to pp=2": {"prefill_parallel": "tp=2", "prefill_devices": (0, 1), "decode_parallel": "pp=2", "decode_devices": (2, 3)},
}


def others() -> dict[str, np.ndarray]:
    """Other weights of the same model, as clear in what they choose."""
    return {name: tensor[::-1].copy() for name, tensor in tiny_model.tensors().items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one model."""
    first, second = (tiny_model.write(tmp_path_factory.mktemp("weights") / name) for name in ("first", "second"))
    save_file(others(), second / "model.safetensors")
    return [first, second]


def tokens(llm: LLM) -> list[list[int]]:
    """Greedy and sampled ones, also of forks of a prompt and of prompts with one prefix."""
    outputs = llm.generate([*PROMPTS[:5], PROMPTS[0], PROMPTS[1]], [GREEDY] * 5 + [SAMPLED] * 2)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_a_fresh_engine(folders: list[Path], layout: str) -> None:
    settings = TINY | SMALL | LAYOUTS[layout]
    wanted = [tokens(LLM(str(folder), **settings)) for folder in folders]
    assert wanted[0] != wanted[1]
    llm = LLM(str(folders[0]), **settings)
    assert tokens(llm) == wanted[0]
    num_compiled = TOTAL.num_compilations
    assert llm.update_params(others()) == 2
    assert tokens(llm) == wanted[1]
    assert llm.update_weights(str(folders[0])) == 3
    assert tokens(llm) == wanted[0]
    for level in (1, 2):
        llm.sleep(level)
        pools = [
            stage.pool
            for runner in (llm.engine._components.prefill, llm.engine._components.decode)
            for stage in runner.worker.runner._stages
        ]
        assert all(pool._array is None for pool in pools)
        assert bool(llm.engine._components.weights.decode) == (level == 1)
        with pytest.raises(RequestError, match="asleep"):
            llm.generate(PROMPTS[0], GREEDY)
        llm.wake()
        assert tokens(llm) == wanted[0]
    assert TOTAL.num_compilations == num_compiled
    assert llm.engine.stats.num_compilations_after_ready == 0


def test_requests_under_way_go_on(folders: list[Path]) -> None:
    """With their tokens, by the new weights from there on; after a sleep as if nothing had been. One that is aborted
    while it is paused is gone."""
    settings = TINY | SMALL
    first, second = (LLM(str(folder), **settings) for folder in folders)
    uninterrupted = first.generate(PROMPTS[:3], GREEDY)
    engine = first.engine
    for number, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(str(number), prompt, GREEDY)
    given: dict[str, list[int]] = {}
    step(engine, given, 6)
    engine.sleep()
    assert not engine.has_work and engine.step() == []
    engine.abort("2")
    engine.wake()
    step(engine, given, 4)
    engine.update_params(others())
    before = {name: list(ids) for name, ids in given.items()}
    while engine.has_requests:
        step(engine, given, 1)
    for number in range(2):
        name, prompt = str(number), PROMPTS[number]
        assert 0 < len(before[name]) < len(given[name]) == GREEDY.max_tokens
        assert before[name] == list(uninterrupted[number].outputs[0].token_ids)[: len(before[name])]
        rest = replace(GREEDY, max_tokens=GREEDY.max_tokens - len(before[name]))
        (output,) = second.generate([[*prompt, *before[name]]], rest)
        assert given[name][len(before[name]) :] == list(output.outputs[0].token_ids)
    assert engine.stats.decode_pages_used == engine.stats.num_running == 0


def step(engine: Engine, given: dict[str, list[int]], count: int) -> None:
    for _ in range(count):
        for delta in engine.step():
            given.setdefault(delta.request_id, []).extend(delta.token_ids)


def test_what_does_not_fit_changes_nothing(folders: list[Path], tmp_path: Path) -> None:
    llm = LLM(str(folders[0]), **(TINY | SMALL))
    wanted = tokens(llm)
    whole = tiny_model.tensors()
    name = next(iter(whole))
    wrong_shape = whole | {name: whole[name][:-1]}
    absent = {other: tensor for other, tensor in whole.items() if other != name}
    for params, message in (
        (absent, name),
        (wrong_shape, name),
        (whole | {"more": np.zeros(3, np.float32)}, "more"),
        (whole | {name: np.zeros(whole[name].shape, np.int8)}, "int8"),
    ):
        with pytest.raises(CheckpointError, match=name if message == name else message):
            llm.update_params(params)
    larger = tiny_model.write(tmp_path / "larger", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="num_layers"):
        llm.update_weights(str(larger))
    damaged = tmp_path / "damaged"
    shutil.copytree(folders[1], damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        llm.update_weights(str(damaged))
    with pytest.raises(ConfigError, match="level"):
        llm.sleep(3)
    assert tokens(llm) == wanted and llm.engine.stats.weights_version == 1


def test_weights_that_cannot_be_read_leave_those_before(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file fails after all checks: what came from a file is read again; arrays that were given are gone, and the
    engine sleeps until it gets others."""
    llm = LLM(str(folders[0]), **(TINY | SMALL))
    wanted = tokens(llm)
    read = ArraySource.read

    def fail(self: ArraySource, name: str, *arguments: Any) -> np.ndarray:
        if "layers.1" in name:
            raise CheckpointError(f"{name} can't be read")
        return read(self, name, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ArraySource, "read", fail)
        with pytest.raises(CheckpointError, match="can't be read"):
            llm.update_params(others())
        assert tokens(llm) == wanted
        llm.sleep()
        with pytest.raises(CheckpointError, match="can't be read"):
            llm.update_params(others())
    with pytest.raises(RequestError, match="asleep"):
        tokens(llm)
    llm.wake()
    assert tokens(llm) == wanted
    llm.update_params(others())
    with monkeypatch.context() as patched:
        patched.setattr(ArraySource, "read", fail)
        with pytest.raises(CheckpointError, match="can't be read"):
            llm.update_params(others())
    with pytest.raises(RequestError, match="asleep"):
        tokens(llm)
    with pytest.raises(CheckpointError, match="give them again"):
        llm.wake()
    llm.update_weights(str(folders[0]))
    assert tokens(llm) == wanted


def test_engines_whose_pages_others_keep_refuse(folders: list[Path], tmp_path: Path) -> None:
    llm = LLM(str(folders[0]), **(TINY | SMALL), kv_host_memory="1MiB", kv_disk=f"{tmp_path / 'kv'}:1MiB")
    with pytest.raises(ConfigError, match="kv_disk"):
        llm.update_params(others())
    with pytest.raises(ConfigError, match="kv_disk"):
        llm.sleep()
    llm.close()
