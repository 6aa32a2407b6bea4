"""Plans for cards that are not here: arithmetic, where their compiler isn't either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxinfer.config import ConfigError
from jaxinfer.dry_run import DryRun, Target, describe, dry_run, smallest_that_fits
from jaxinfer.models.config import UnsupportedModelError
from jaxinfer.models.shapes import model_shape, read_shape
from server.cli import main
from tests import tiny_model

GIB = 2**30


def plan(model: str, target: str, **settings: int) -> DryRun:
    return dry_run(model_shape(model), Target.of(target), **settings)


def test_bytes_add_up_and_pages_are_of_what_is_left() -> None:
    run = plan("llama-3.1-8b", "1xh100")
    assert run.weight_bytes == pytest.approx(8.03e9 * 2, rel=1e-3)
    assert run.kv_bytes == run.total_bytes - run.reserved_bytes - run.weight_bytes - run.activation_bytes > 60 * GIB
    assert run.page_bytes == 16 * 131072
    assert run.kv_tokens == (run.kv_bytes // run.page_bytes - 1) * 16
    assert run.fits
    two = plan("llama-3.1-8b", "2xh100")
    assert two.weight_bytes == pytest.approx(run.weight_bytes / 2, rel=1e-3)
    assert two.page_bytes == run.page_bytes // 2, "KV heads are split"


def test_experts_are_as_they_are_published() -> None:
    kimi = plan("kimi-k2.5", "8xh100")
    assert "experts int4" in kimi.matrices
    assert 560e9 < 8 * kimi.weight_bytes < 620e9
    assert 8 * kimi.kv_bytes > 30 * GIB
    assert kimi.page_bytes == 16 * 70272, "every device has all latents"
    assert "experts fp8" in plan("deepseek-v3", "8xh200").matrices


def test_chunked_layers_leave_long_contexts_room() -> None:
    scout = plan("llama-4-scout", "2xh200", context=1_000_000)
    assert scout.fits
    assert scout.kv_tokens > 1_200_000
    assert scout.token_bytes == 49152
    assert 2 * scout.kv_bytes > 56 * GIB


def test_what_does_not_fit_is_told_with_what_would() -> None:
    run = plan("llama-3.1-405b", "4xh100")
    assert (run.fits, run.kv_bytes, run.kv_tokens) == (False, 0, 0)
    assert smallest_that_fits(model_shape("llama-3.1-405b"), run) == Target("h100", 16)
    assert not plan("llama-3.1-70b", "2xh100", context=131072).fits


@pytest.mark.parametrize("target", ["h100", "8xb200", "0xh100", "8 x h100", "cpu"])
def test_targets_that_are_not_known_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 8xh100; known are h100, h200"):
        Target.of(target)


def test_axes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match="kv_heads axis of 4 can't be split over 8 devices"):
        plan("qwen3-235b-a22b", "8xh100")


def test_any_config_json_will_do(tmp_path: Path) -> None:
    folder = tiny_model.write(tmp_path / "tiny")
    assert read_shape(str(folder)) == read_shape(str(folder / "config.json")) == tiny_model.CONFIG
    assert dry_run(read_shape(str(folder)), Target.of("1xh100"), context=10**9).context == tiny_model.CONTEXT
    (tmp_path / "bad.json").write_text("[1]")
    for name, words in (("bad.json", "must be an object"), ("none.json", "can't be read")):
        with pytest.raises(UnsupportedModelError, match=words):
            read_shape(str(tmp_path / name))


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "llama-3.1-8b", "--target", "1xh100"]
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    table = capsys.readouterr().out
    assert exit_.value.code == 0
    run = plan("llama-3.1-8b", "1xh100")
    assert all(name in table for name, _ in describe(run))
    assert f"{run.kv_tokens:,} tokens fit" in table
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    made = json.loads(capsys.readouterr().out)
    assert made == run.as_json()
    assert {"fits", "compiled", "devices", "kv_tokens", "prefill_parallel", "decode_parallel"} <= made.keys()
    assert len(made["devices"]) == 1
    assert sum(made["devices"][0].values()) == run.total_bytes


def test_without_the_cards_compiler_it_says_that_it_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(card: str, num_devices: int) -> None:
        raise RuntimeError(f"no compiler for a {card}")

    monkeypatch.setattr("jaxinfer.dry_run.target_devices", nowhere)
    run = plan("smollm2-135m", "1xh200")
    assert not run.is_compiled
    assert run.notes == ("no compiler for a h200",)
    assert ("activations", dict(describe(run))["activations"].rpartition(", ")[2]) == ("activations", "estimated")
