"""The commands with a real model: tokens equal to the engine's offline, in this process and in one of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest

from jaxinfer.request import SamplingParams
from server.cli import main
from tests.conftest import QUICK_COMPILATION
from tests.engine.workload import workload

PROMPTS, _ = workload()
FLAGS = [
    "--dtype",
    "float32",
    "--kv-memory",
    "512KiB",
    "--decode-buckets",
    "8,32",
    "--prefill-buckets",
    "32,128",
    "--prefill-chunk-size",
    "128",
]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code)


def test_batch_gives_the_tokens_of_the_engine(tiny_model_path, llm, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": tiny_model_path.name, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}}
        for i, prompt in enumerate(PROMPTS)
    ]
    messages = [{"role": "user", "content": "tell me"}]
    lines.append({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body | {"messages": messages}})
    lines.append({"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": [9999]}})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines[:20]))
    assert run("batch", str(source), str(target), "--model", str(tiny_model_path), *FLAGS) == 0
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))  # and the rest in a second run
    assert run("batch", str(source), str(target), "--model", str(tiny_model_path), *FLAGS) == 0

    answers = [json.loads(line) for line in target.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer["response"] for answer in answers}
    assert len(answers) == len(by_id) == len(lines)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for i, output in enumerate(llm.generate(PROMPTS, params)):
        assert by_id[f"c{i}"]["body"]["choices"][0]["text"] == output.outputs[0].text
    assert by_id["chat"]["body"]["choices"][0]["message"]["content"] == llm.chat(messages, params).outputs[0].text
    assert by_id["bad"]["status_code"] == 400
    assert "0 to 511" in by_id["bad"]["body"]["error"]["message"]


def test_generate_streams_the_engines_text(tiny_model_path, llm, capsys):
    flags = ["--no-chat", "--max-tokens", "30", "--ignore-eos", "--model", str(tiny_model_path), *FLAGS]
    assert run("generate", "the rest of it", *flags) == 0
    [output] = llm.generate(["the rest of it"], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert capsys.readouterr().out == output.outputs[0].text + "\n"


def test_what_the_user_can_mend_is_told_in_one_line(tiny_model_path, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    (tmp_path / "model.safetensors").write_bytes((tiny_model_path / "model.safetensors").read_bytes())
    for model, flags, words in (
        (tmp_path, [], "GPT2LMHeadModel"),
        (tiny_model_path, ["--decode-devices", "8"], r"decode_devices is \(8,\): device 8 does not exist"),
        (tiny_model_path, ["--kv-memory", "1KiB"], "kv_memory of 1024 bytes holds no KV page"),
        (tmp_path / "nowhere", [], "nowhere"),
    ):
        assert run("generate", "x", "--model", str(model), *flags) == 2
        said = capsys.readouterr().err
        assert re.search(f"jaxinfer: error: .*{words}", said)
        assert "Traceback" not in said


def test_serve_on_two_virtual_devices_until_told_to_stop(tiny_model_path, llm, tmp_path):
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(tiny_model_path), "--port", "0"]
    command += ["--cpu-devices", "2", "--prefill-devices", "0", "--decode-devices", "1", "--max-batch-size", "8", *FLAGS[:2]]
    command += ["--decode-buckets", "8", "--prefill-buckets", "128", "--prefill-chunk-size", "128"]
    log = tmp_path / "log"
    with log.open("wb") as written:
        server = subprocess.Popen(
            command, stdout=written, stderr=written, cwd=Path(__file__).parents[2], env=os.environ | QUICK_COMPILATION | {"COLUMNS": "200"}
        )
    try:
        url = wait_for(server, log, r"ready on (http://\S+)")
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
            answer = api.completions.create(
                model=tiny_model_path.name, prompt=PROMPTS[:8], max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
            )
        expected = llm.generate(PROMPTS[:8], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in expected]
        with urllib.request.urlopen(url + "/metrics") as page:
            metrics = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if not line.startswith("#"))
        assert float(metrics["jaxinfer_compilations_after_ready_total"]) == 0
        assert float(metrics["jaxinfer_kv_pages_moved_total"]) > 8
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()


def wait_for(server: subprocess.Popen, log: Path, pattern: str) -> str:
    """What the pattern finds in the server's log, once it is there."""
    for _ in range(1200):
        if found := re.search(pattern, log.read_text()):
            return found[1]
        try:
            server.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(log.read_text())
