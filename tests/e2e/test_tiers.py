"""Whatever ends in good order leaves in the file what its engine kept, and the next one starts from it."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.llm import LLM
from server.cli import main
from server.config import ServerConfig
from server.local_backend import LocalBackend
from server.openai.app import create_app
from tests.conftest import TINY
from tests.engine.test_token_equality import SMALL
from tests.engine.workload import workload
from tests.server.serving import served

PROMPT = next(prompt for prompt in workload()[0] if len(prompt) == 100)
FLAGS = [
    "--dtype",
    "float32",
    "--kv-memory",
    "512KiB",
    "--max-batch-size",
    "8",
    "--decode-buckets",
    "8",
    "--prefill-buckets",
    "128",
    "--prefill-chunk-size",
    "128",
]


def settings(file: Path) -> dict[str, str]:
    return {"kv_host_memory": "1MiB", "kv_disk": f"{file}:1MiB"}


def num_pages(model: Path, file: Path) -> int:
    """Of the file, that an engine believes."""
    with LLM(str(model), **TINY | SMALL | settings(file)) as llm:
        assert llm.engine.stats.read_tiers is not None
        return llm.engine.stats.read_tiers().disk_pages


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_a_command_leaves_its_pages_in_the_file(tiny_model_path, tmp_path, capsys, command):
    file, source = tmp_path / "kv", tmp_path / "in.jsonl"
    body = {"model": tiny_model_path.name, "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
    source.write_text(json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}))
    what = {
        "generate": ["x" * 100, "--no-chat", "--max-tokens", "20", "--ignore-eos"],
        "batch": [str(source), str(tmp_path / "out.jsonl")],
    }[command]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings(file).items()]
    with pytest.raises(SystemExit) as ended:
        main([command, *what, "--model", str(tiny_model_path), *FLAGS, *flags])
    assert ended.value.code == 0
    assert num_pages(tiny_model_path, file) == (100 + 20 - 1) // 16


def test_a_server_leaves_its_pages_in_the_file_and_the_next_one_uses_them(tiny_model_path, tmp_path):
    config = EngineConfig.of(model=str(tiny_model_path), **TINY | SMALL | settings(tmp_path / "kv"))
    answers = []
    for _ in range(2):
        engine = Engine(config)
        engine._components.prefill.tiers._seconds_to_compute = lambda num_tokens: float("inf")
        app = create_app(LocalBackend(engine), engine.tokenizer, ServerConfig(served_model_name=("tiny",)))
        with served(app) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
            answers.append(
                api.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, extra_body={"ignore_eos": True})
            )
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 96]
