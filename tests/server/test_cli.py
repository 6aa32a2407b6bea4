"""The `jaxinfer` command: its flags, its errors in one line, and what generate and batch write."""

import argparse
import dataclasses
import io
import json
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from checkpoints.source import CheckpointError
from jaxinfer.config import ConfigError, EngineConfig, flat_fields
from server import cli
from server.cli.demo import WordWrap
from server.cli.parser import parse as parse_command
from server.cli.server_config import KEYS_VARIABLE, PRIORITY_KEYS_VARIABLE, server_config
from server.cli.several_models import for_each_model
from server.config import ServerConfig
from server.flags import add_flags, given_flags
from tests.server.scripted_engine import ScriptedEngine

ROOT = Path(cli.__file__).parents[2]


@pytest.fixture
def engines(monkeypatch):
    """The engines that the command starts, none of which loads a model."""
    made = []

    def make(config, progress=None):
        made.append(ScriptedEngine(config, batch_size=8))
        return made[-1]

    monkeypatch.setitem(sys.modules, "jaxinfer.engine", types.SimpleNamespace(Engine=make))
    return made


def run(*arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    return exit.value.code


TWO_MODELS = ("serve", "--model", "default", "--model", "default", "--served-model-name", "a", "--served-model-name", "b")

# What takes 0.1 s to import, or seconds.
HEAVY = {"jax", "flax", "numpy", "pydantic", "fastapi", "uvicorn", "rich", "huggingface_hub", "tokenizers", "safetensors", "asyncio"}


def in_own_process(*arguments):
    """Run the command line. Returns its exit code, what it wrote to both streams, the heavy packages it imported, and its CPU seconds."""
    script = (
        "import sys, time\nfrom server.cli import main\ntry: main(sys.argv[1:])\n"
        f"except SystemExit as ended: print(ended.code, sorted({HEAVY!r} & set(sys.modules)), time.process_time(), sep='|')"
    )
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True)
    output, _, last = done.stdout.rstrip().rpartition("\n")
    code, heavy, seconds = last.split("|")
    return int(code), output, heavy, float(seconds)


@pytest.mark.parametrize(("arguments", "shows"), [((), "serve "), (("generate",), "--temperature"), (("serve",), "--prefill-devices")])
def test_help_is_quick_because_nothing_heavy_is_imported(arguments, shows):
    tries = [in_own_process(*arguments, "--help") for _ in range(3)]
    assert {(code, heavy) for code, _, heavy, _ in tries} == {(0, "[]")}
    assert shows in tries[0][1]
    assert min(seconds for *_, seconds in tries) < 0.25


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "--port", "99999"), "port is 99999"),
        (("serve", "--port", "{taken}"), "can't listen on 127.0.0.1 port {taken}: "),
        (("serve", "--port", "0", "--model", "nowhere"), "model 'nowhere' does not exist: give a local folder"),
        (("serve", "--port", "0", "--model", "{folder}/empty"), "config.json: missing; give a folder with config.json"),
        (("generate", "hi", "--model", "{folder}/broken"), "broken/config.json: can't be read as JSON"),
        (("batch", "in", "out", "--model", "{folder}/text.gguf"), "text.gguf: not a GGUF file (it starts with b'hell')"),
        (("serve", "--port", "0", "--embedding-model", "nowhere"), "model 'nowhere' does not exist"),
        (("serve", "--prefill-parallel", "tp=x"), "prefill_parallel is 'tp=x'"),
        (("serve", "--prefill-parallel", "tp=2", "--prefill-devices", "0"), "prefill_parallel is tp=2, for 2 device(s)"),
        (
            ("serve", "--model", "default", "--model", "default"),
            "two models would have the name 'SmolLM2-135M-Instruct': give --served-model-name",
        ),
        (
            ("serve", "--served-model-name", "a", "--served-model-name", "b"),
            "--served-model-name is given 2 times for 1 model(s): give it once",
        ),
        ((*TWO_MODELS, "--kv-host-memory", "1GiB", "--kv-disk", "kv.bin:1GiB"), "kv_disk is kv.bin:1GiB, but there are 2 models (--model)"),
        ((*TWO_MODELS, "--num-processes", "2", "--coordinator", "a:1"), "num_processes is 2, but there are 2 models (--model)"),
        ((*TWO_MODELS, "--profile", "folder"), "profile is folder, but there are 2 models (--model)"),
        ((*TWO_MODELS, "--models-memory", "big"), "models_memory is 'big': give a size such as 512MiB"),
        ((*TWO_MODELS, "--models-turn", "0"), "models_turn is 0: give seconds above 0"),
        (("serve", "--decode-devices", "2", "--cpu-devices", "2"), "device 2 does not exist: this machine has 2 cpu device(s)"),
        (("inspect", "{folder}/nowhere.gguf"), "nowhere.gguf' does not exist"),
    ],
)
def test_mistakes_are_told_before_anything_heavy_is_imported(tmp_path, monkeypatch, arguments, says):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for folder in ("empty", "broken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    (tmp_path / "text.gguf").write_text("hello")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"taken": str(taken.getsockname()[1]), "folder": str(tmp_path)}
        code, output, heavy, seconds = in_own_process(*(argument.format(**names) for argument in arguments))
    assert (code, heavy) == (2, "[]")
    assert output.startswith("jaxinfer: error: ")
    assert output.count("\n") == 0
    assert says.format(**names) in output
    assert seconds < 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("worker", "--router", "nowhere"), "router is 'nowhere': give HOST:PORT"),
        (("worker", "--router", "here:1", "--port", "{taken}"), "choose others with --host and --port"),
        (("worker", "--router", "here:1", "--page-port", "{taken}"), "choose others with --host and --page-port"),
        (("worker", "--router", "here:1", "--kv-transport=jax", "--kv-compression=on"), "kv_transport is jax, whose pages can't be coded"),
        (("router", "--port", "0", "--workers-host", "0.0.0.0"), "workers_host is 0.0.0.0, which other machines can reach"),
    ],
)
def test_a_clusters_mistakes_are_told_before_a_model_is_loaded(monkeypatch, arguments, says):
    monkeypatch.delenv("JAXINFER_WORKER_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, output, heavy, _ = in_own_process(*(argument.format(taken=taken.getsockname()[1]) for argument in arguments))
    assert (code, "jax" in heavy) == (2, False)
    assert output.startswith("jaxinfer: error: ") and says in output and output.count("\n") == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "--prot", "80"), "jaxinfer serve: error: unknown flag --prot: did you mean --port?"),
        (("batch", "--max-batch", "3"), "jaxinfer batch: error: unknown flag --max-batch: did you mean --max-batch-size?"),
        (("generate", "--colour=red", "hi"), "jaxinfer generate: error: unknown flag --colour"),
        *(
            (
                (command, *needed, "--model", "a", "--model", "b"),
                f"jaxinfer {command}: error: --model is given more than once: one process of this command has one model; "
                "`jaxinfer serve` takes several",
            )
            for command, *needed in (("worker", "--router", "a:1"), ("router",), ("generate", "x"))
        ),
        (("serve", "default"), "jaxinfer serve: error: unexpected argument default"),
        (("serve", "--port", "x"), "jaxinfer serve: error: argument --port: invalid int value: 'x'"),
        (("sreve",), "jaxinfer: error: unknown command 'sreve': did you mean serve?"),
    ],
)
def test_a_mistyped_flag_is_told_in_two_lines_with_the_nearest(capsys, arguments, says):
    assert run(*arguments) == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: jaxinfer ")
    assert error == says


def test_what_begins_like_a_flag_may_still_be_a_prompt(engines, capsys):
    assert run("generate", "--what is this", "--max-tokens", "1") == 0
    assert run("generate", "--max-tokens", "1", "--", "--what") == 0
    assert run("generate", "-1", "--max-tokens", "1") == 0


@pytest.mark.parametrize("command", ["serve", "generate", "batch", "demo"])
def test_every_setting_is_a_flag_with_its_help_and_default(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # else it is cut within words that have a hyphen
    assert run(command, "--help") == 0
    help = " ".join(capsys.readouterr().out.split())
    fields = flat_fields() + (list(dataclasses.fields(ServerConfig)) if command == "serve" else [])
    for field in fields:
        if "instead" in field.metadata or not field.metadata.get("has_flag", True):
            continue
        assert "--" + field.name.replace("_", "-") in help
        assert " ".join(field.metadata["help"].split()) in help


def configured(*flags):
    """The ServerConfig of `jaxinfer serve` with these flags."""
    _, arguments = parse_command(["serve", *flags])
    (first,) = for_each_model(arguments)
    return server_config(first, EngineConfig.of(**given_flags(first, flat_fields())))  # of models that need not be there


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_flags(parser, "engine", flat_fields())
    return given_flags(parser.parse_args(arguments), flat_fields())


def test_only_given_flags_are_passed_on_and_each_in_its_own_type():
    assert parse() == {}
    flags = parse("--prefill-devices", "0,1", "--decode-devices", "2", "--max-model-len", "64", "--random-weights", "--dtype", "float32")
    assert flags == {"prefill_devices": (0, 1), "decode_devices": (2,), "max_model_len": 64, "random_weights": True, "dtype": "float32"}
    assert EngineConfig.of(**flags).devices.decode_devices == (2,)


@pytest.mark.parametrize("arguments", [("--dtype", "int7"), ("--page-size", "x"), ("--prefill-devices", "0,a"), ("--pages", "3")])
def test_flags_that_make_no_sense_are_refused(arguments):
    with pytest.raises(SystemExit) as exit:
        parse(*arguments)
    assert exit.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "hi", "--page-size", "0"), "page_size is 0: it must be at least 1"),
        (("generate", "hi", "--temperature", "-1"), "temperature is -1.0"),
        (("generate", ""), "the prompt is empty"),
        (("serve", "--port", "99999"), "port is 99999"),
        (("serve", "--max-body-size", "big"), "max_body_size is 'big'"),
        (("serve", "--request-timeout", "0"), "request_timeout is 0.0: give seconds above 0"),
        (("serve", "--usage-log", "no/such/folder/usage.jsonl"), "usage_log is 'no/such/folder/usage.jsonl': No such file or directory"),
        (("serve", "--host", "203.0.113.1"), "can't listen on 203.0.113.1 port 8000"),
        (
            ("serve", "--port", "0", "--log-level", "error", "--batch-dir", "/dev/null/batches"),
            "batch_dir is /dev/null/batches: Not a directory; give a folder",
        ),
        (("batch", "no-such.jsonl", "out.jsonl"), "input is no-such.jsonl: No such file or directory; name a file of batch lines"),
        (("batch", "/", "out.jsonl"), "input is /: Is a directory; name a file"),
        (("batch", "/dev/null", "no/such/out.jsonl"), "output is no/such/out.jsonl: No such file or directory; name a file that can"),
        (("follow",), "`jaxinfer follow` needs process 0's address: give --coordinator HOST:PORT"),
        (("follow", "--coordinator", "127.0.0.1:7000"), "needs a number of its own: give --process-id, from 1 on"),
        (("follow", "--coordinator", "127.0.0.1:7000", "--process-id", "0"), "from 1 on, not 0, which is process 0's"),
    ],
)
def test_mistakes_are_told_in_one_line(engines, capsys, arguments, says):
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxinfer: error: ")
    assert error.count("\n") == 1
    assert says in error


def test_a_broken_checkpoint_is_told_in_one_line(monkeypatch, capsys):
    def fail(config, progress=None):
        raise CheckpointError("model.gguf: ends after 12 bytes; fetch it again")

    monkeypatch.setitem(sys.modules, "jaxinfer.engine", types.SimpleNamespace(Engine=fail))
    assert run("generate", "hi") == 2
    assert capsys.readouterr().err.endswith("jaxinfer: error: model.gguf: ends after 12 bytes; fetch it again\n")


def test_generate_streams_the_answer_to_standard_output(engines, capsys):
    assert run("generate", "Hi", "--max-tokens", "6", "--kv-memory", "1MiB") == 0
    captured = capsys.readouterr()
    assert captured.out == "abcdef\n"
    assert engines[0].config.cache.kv_memory == "1MiB"
    text = engines[0].tokenizer.decode(engines[0].prompts[0], skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_generate_without_chat_continues_the_text_itself(engines, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(read=lambda: "from a pipe"))
    assert run("generate", "-", "--no-chat", "--max-tokens", "1") == 0
    assert engines[0].tokenizer.decode(engines[0].prompts[0]) == "from a pipe"


def test_one_answer_compiles_no_program_for_several(engines, capsys):
    assert run("generate", "Hi") == run("demo") == run("generate", "Hi", "--max-batch-size", "4", "--decode-buckets", "2,4") == 0
    schedules = [engine.config.schedule for engine in engines]
    assert [s.decode_buckets for s in schedules] == [(1,), (1,), (2, 4)]
    assert [s.prefill_buckets for s in schedules] == [(32, 128, 512), (128,), (32, 128, 512)]


def test_the_demos_lines_break_between_words():
    written = io.StringIO()
    wrap = WordWrap(written, 12)
    for text in ("The s", "ky is blue", ".\nAir", " scatters  light extraordinarily-well ", "now", "\n"):
        wrap.write(text)
    lines = written.getvalue().split("\n")
    assert [line.rstrip() for line in lines] == ["The sky is", "blue.", "Air scatters", "light", "extraordinarily-well", "now", ""]


def test_demo_tells_what_ran_where_and_how_fast(engines, capsys):
    assert run("demo", "--max-tokens", "4") == 0
    table = capsys.readouterr().err
    for row in (
        "prefill mesh",
        "decode mesh",
        "load",
        "compile",
        "matrices",
        "KV",
        "time to first token",
        "decode",
        "KV pages",
        "compiled after ready",
    ):
        assert row in table


def test_batch_writes_answers_and_resumes(engines, capsys, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "default", "prompt": "x", "max_tokens": 3}
    lines = [json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}) for n in range(20)]
    source.write_text("\n".join(lines[:12]) + "\n")
    assert run("batch", str(source), str(target)) == 0
    assert "12 answered, 0 of them with an error; 0 kept" in capsys.readouterr().err
    source.write_text("\n".join(lines) + "\n")
    assert run("batch", str(source), str(target)) == 0
    assert "8 answered, 0 of them with an error; 12 kept" in capsys.readouterr().err
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(20))
    assert {answer["response"]["body"]["choices"][0]["text"] for answer in answers} == {"abc"}


def test_batch_says_what_is_left_when_the_engine_fails(monkeypatch, capsys, tmp_path):
    def make(config, progress=None):
        engine = ScriptedEngine(config)
        engine.error = RuntimeError("out of memory")
        return engine

    monkeypatch.setitem(sys.modules, "jaxinfer.engine", types.SimpleNamespace(Engine=make))
    source = tmp_path / "in.jsonl"
    source.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "default", "prompt": "x"}})
    )
    assert run("batch", str(source), str(tmp_path / "out.jsonl")) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "out of memory" in error
    assert "run the same command again for the rest" in error


@pytest.mark.parametrize(("max_queue_size", "max_prompts"), [(4, 4), (1000, 128)])
def test_more_prompts_than_may_wait_are_refused_for_good(engines, monkeypatch, capsys, max_queue_size, max_prompts):
    configs = []

    def create_app(backend, tokenizer, config, *rest):
        configs.append(config)
        raise ConfigError("far enough")

    monkeypatch.setattr("server.openai.app.create_app", create_app)
    assert run("serve", "--port", "0", "--log-level", "error", "--max-queue-size", str(max_queue_size)) == 2
    assert capsys.readouterr().err.endswith("jaxinfer: error: far enough\n")
    assert [config.max_prompts for config in configs] == [max_prompts]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((), ("SmolLM2-135M-Instruct", "default")),
        (("--model", "org/Name"), ("Name", "org/Name")),
        (("--model", "/models/tiny.Q4_1.gguf"), ("tiny.Q4_1",)),
        (("--model", str(ROOT)), (ROOT.name,)),
        (("--served-model-name", "a,b"), ("a", "b")),
    ],
)
def test_a_model_is_served_under_its_short_name_and_the_given_one(flags, names):
    assert configured(*flags).model_names == names


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--embedding-model", "minilm"), ("all-MiniLM-L6-v2", "minilm")),
        (("--embedding-model", "org/Name"), ("Name", "org/Name")),
        (("--embedding-model", str(ROOT)), (ROOT.name,)),
        (("--embedding-model", "minilm", "--served-embedding-name", "a,b"), ("a", "b")),
    ],
)
def test_an_embedding_model_has_names_of_its_own(flags, names):
    config = configured(*flags)
    assert config.embedding_names == names
    assert config.model_names == ("SmolLM2-135M-Instruct", "default")


def test_each_of_several_models_has_its_names_in_the_order_of_the_flags():
    flags = ("--model", "org/A", "--model", "org/B", "--embedding-model", "minilm")
    _, arguments = parse_command(["serve", *flags])
    assert [(one.model, getattr(one, "embedding_model", None)) for one in for_each_model(arguments)] == [
        ("org/A", "minilm"),
        ("org/B", None),
    ]
    _, arguments = parse_command(["serve", *flags, "--served-model-name", "a,b", "--served-model-name", "c"])
    assert [one.served_model_name for one in for_each_model(arguments)] == [("a", "b"), ("c",)]


def test_api_keys_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, "one, two")
    assert configured().api_keys == ("one", "two")
    monkeypatch.setenv(PRIORITY_KEYS_VARIABLE, "two")
    assert configured().priority_keys == ("two",)


def test_a_flag_is_never_guessed_from_its_beginning(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["generate", "--prefill-bucket", "3", "hi"])
    assert exit_info.value.code == 2
    assert "--prefill-bucket" in capsys.readouterr().err
