"""The `jaxinfer` command: serve, generate, batch, demo, follow, convert, inspect, plan. Engine flags are EngineConfig's fields; JAX loads when a command needs it."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from checkpoints.source import CheckpointError
from jaxinfer.config import ConfigError, EngineConfig, flat_fields, parse_bytes
from jaxinfer.models.config import UnsupportedModelError
from jaxinfer.request import RequestError, SamplingParams
from server.config import ServerConfig
from server.flags import add_flags, given
from server.summary import Measured, summary_table

if TYPE_CHECKING:
    from jaxinfer.engine import Engine

SERVED_AS = {"default": ("SmolLM2-135M-Instruct", "default"), "minilm": ("all-MiniLM-L6-v2", "minilm")}  # models known by two names
DEMO_PROMPT = "Explain in a few sentences why the sky is blue."
KEYS_VARIABLE, PRIORITY_KEYS_VARIABLE = "JAXINFER_API_KEYS", "JAXINFER_PRIORITY_KEYS"

USER_ERROR = 2
INTERRUPTED = 130  # as shells report a command that Ctrl+C ended


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0, 2 for what the user can mend (said in one line), 130 when interrupted."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(level=getattr(parsed, "log_level", "warning").upper(), format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        sys.exit(parsed.run(parsed))
    except (ConfigError, CheckpointError, UnsupportedModelError, RequestError, OSError) as error:
        print(f"jaxinfer: error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxinfer", allow_abbrev=False, description="JAX inference: prefill and decode as two programs on two meshes."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve", allow_abbrev=False, help="OpenAI-compatible HTTP server and chat page", description="Serve a model over HTTP."
    )
    add_flags(serve, "server", dataclasses.fields(ServerConfig))
    serve.set_defaults(run=_serve)

    generate = commands.add_parser(
        "generate", allow_abbrev=False, help="answer one prompt on the terminal", description="Stream an answer to the terminal."
    )
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.set_defaults(run=_generate)

    demo = commands.add_parser(
        "demo", allow_abbrev=False, help="generate with a ready prompt, then say what ran where", description="A first look."
    )
    demo.add_argument("prompt", nargs="?", default=DEMO_PROMPT, help="the prompt (default: %(default)s)")
    demo.set_defaults(run=_generate, stats=True)
    for command in (generate, demo):
        _add_generate_flags(command)

    batch = commands.add_parser(
        "batch", allow_abbrev=False, help="answer a file of OpenAI batch requests", description="Run a batch file; resumes where it ended."
    )
    batch.add_argument("input", type=Path, help='a request a line: {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}')
    batch.add_argument("output", type=Path, help="an answer a line; lines already there are kept and not asked again")
    batch.set_defaults(run=_batch)

    for command in (serve, generate, demo, batch):
        add_flags(command, "engine", flat_fields())
    follow = commands.add_parser(
        "follow",
        allow_abbrev=False,
        help="lend this process's devices to an engine that process 0 drives",
        description="See docs/distributed.md.",
    )
    add_flags(follow, "engine (process 0's where they aren't given)", flat_fields())
    follow.set_defaults(run=_follow)
    _add_checkpoint_commands(commands)
    _add_plan_command(commands)
    return parser


def _add_plan_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan", allow_abbrev=False, help="what a model takes on cards that need not be here", description="Needs no weights and no GPU."
    )
    flag = plan.add_argument
    flag("--model", metavar="NAME", help="a known shape, such as llama-3.1-8b, or a config.json")
    flag("--calibrate", action="store_true", help="first measure this machine's processor, for plans with the target cpu; takes minutes")
    flag("--target", metavar="NxCARD", help="such as 8xh100 or 2xh200; cpu: this machine, 4xcpu: cut into virtual devices")
    flag("--prefill-parallel", metavar="TEXT", help="layout of prefill, such as tp=2,pp=2; without any all layouts are ranked")
    flag("--decode-parallel", metavar="TEXT", help="layout of decode; if it is prefill's both share devices")
    flag(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights on a CPU, as for serve (default: %(default)s)"
    )
    flag("--context", type=int, metavar="N", help="tokens that one request may have (default: 8192, or the model's)")
    flag("--batch", type=int, metavar="N", help="sequences that decode at once (default: the power of two that has room, up to 256)")
    flag("--input-length", type=int, default=2048, metavar="N", help="tokens of a prompt, on average (default: %(default)s)")
    flag("--output-length", type=int, default=256, metavar="N", help="tokens of an answer, on average (default: %(default)s)")
    flag("--trace", type=Path, metavar="FILE", help='requests instead: a line each with "input_length" and "output_length"')
    flag(
        "--compile", type=int, default=1, metavar="N", help="layouts to compile, the best first; 0: arithmetic alone (default: %(default)s)"
    )
    flag("--json", action="store_true", help="for programs")
    flag("--plot", type=Path, metavar="PNG", help="draw stages, memory and the timeline")
    plan.set_defaults(run=_plan)


def _add_checkpoint_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = commands.add_parser(
        "convert", allow_abbrev=False, help="write a checkpoint in another format", description="To a folder of safetensors or Orbax."
    )
    convert.add_argument("--format", choices=("safetensors", "orbax"), default="safetensors", help="to write (default: %(default)s)")
    convert.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of all weights (default: as stored; once quantised, float32)"
    )
    convert.add_argument("--shard-size", default="5GB", metavar="SIZE", help="of a safetensors file, at most (default: %(default)s)")
    convert.add_argument("--force", action="store_true", help="replace what is in DST")
    inspect = commands.add_parser(
        "inspect", allow_abbrev=False, help="what a checkpoint holds, and whether it can be served", description="Reads no weights."
    )
    inspect.add_argument("--json", action="store_true", help="for programs: sizes in bytes, every tensor by itself")
    for command, run in ((convert, _convert), (inspect, _inspect)):
        command.add_argument("source", metavar="SRC", help="'default', 'minilm', a folder, a .gguf file or a Hugging Face id")
        command.set_defaults(run=run)
    convert.add_argument("destination", metavar="DST", type=Path, help="a folder to be made")


def _add_generate_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    flag = group.add_argument
    flag("--chat", action=argparse.BooleanOptionalAction, default=True, help="use the model's chat template (default: on)")
    flag("--system", metavar="TEXT", help="a system message before the prompt")
    flag("--max-tokens", type=int, default=256, metavar="N", help="most tokens to generate (default: %(default)s)")
    flag("--temperature", type=float, default=0.0, metavar="X", help="0: always the likeliest token (default: %(default)s)")
    flag("--top-k", type=int, default=0, metavar="N", help="sample among the N likeliest tokens; 0: all (default: %(default)s)")
    flag("--top-p", type=float, default=1.0, metavar="X", help="sample among the likeliest that make up X (default: %(default)s)")
    flag("--min-p", type=float, default=0.0, metavar="X", help="leave out tokens under X times the likeliest (default: %(default)s)")
    flag("--repetition-penalty", type=float, default=1.0, metavar="X", help="over 1: repeat less (default: %(default)s)")
    flag("--seed", type=int, metavar="N", help="the same seed gives the same tokens")
    flag("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    flag("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    if parser.get_default("stats") is None:
        flag("--stats", action="store_true", help="then print devices, times, speed and memory")


def _start_engine(arguments: argparse.Namespace, console: Console) -> Engine:
    """Load and compile, with a spinner on a terminal."""
    config = EngineConfig.of(**given(arguments, flat_fields()))
    with console.status(f"starting {config.model.model}: loading weights and compiling programs"):
        from jaxinfer.engine import Engine

        return Engine(config)


def _follow(arguments: argparse.Namespace) -> int:
    from jaxinfer.distributed.follow import follow

    follow(given(arguments, flat_fields()), lambda: print("ready", file=sys.stderr, flush=True))
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True)
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos")
    params = SamplingParams(**{name: getattr(arguments, name) for name in names})
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise RequestError("the prompt is empty: give some text")
    with closing(_start_engine(arguments, console)) as engine:
        if arguments.chat:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            prompt = engine.tokenizer.render_chat([*system, {"role": "user", "content": prompt}])
        token_ids = engine.tokenizer.encode(prompt, add_special_tokens=not arguments.chat)
        measured = _stream_to_terminal(engine, token_ids, params)
    if arguments.stats:
        console.print()
        console.print(summary_table(engine.stats, measured))
    return 0


def _stream_to_terminal(engine: Engine, token_ids: list[int], params: SamplingParams) -> Measured:
    start = time.perf_counter()
    first = last = None
    num_tokens = 0
    engine.validate(token_ids, params)
    engine.add_request("generate", token_ids, params)
    while engine.has_work:
        for delta in engine.step():
            print(delta.text, end="", flush=True)
            num_tokens += len(delta.token_ids)
            if delta.token_ids:
                last = time.perf_counter()
                first = first or last
    print(flush=True)
    first, last = first or start, last or start
    return Measured(len(token_ids), num_tokens, first - start, last - first)


def _plan(arguments: argparse.Namespace) -> int:
    from server.planning import calibrate_cpu, make_plan, show

    if arguments.calibrate:
        with Console(stderr=True).status("calibrating") as status:
            told = calibrate_cpu(arguments.target, status.update)
        print(told)
        if arguments.model is None:
            return 0
    with Console(stderr=True).status(f"planning {arguments.model} for {arguments.target}"):
        run = make_plan(arguments)
    show(run, is_json=arguments.json)
    if arguments.plot is not None:
        try:
            from jaxinfer.dry_run.plot import draw
        except ModuleNotFoundError as error:
            raise ConfigError(f"plot is {arguments.plot}, but {error.name} is not installed: pip install 'jaxinfer[bench]'") from error
        draw(run, arguments.plot, arguments.model)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from server.batches.batch_store import BatchStore
    from server.graceful import GracefulServer
    from server.local_backend import LocalBackend
    from server.openai.app import create_app
    from server.usage_log import UsageLog

    config = _server_config(arguments)
    console = Console(stderr=True)
    usage_log = UsageLog(config.usage_log) if config.usage_log else nullcontext()
    store = closing(BatchStore(Path(config.batch_dir).expanduser())) if config.batch_dir else nullcontext()
    with _listening_socket(config) as listener, usage_log as log, store as batches:  # before the long start, which a failure would waste
        engine = _start_engine(arguments, console)
        console.print(summary_table(engine.stats))
        host, port = listener.getsockname()[:2]
        message = f"{config.model_name} is ready on http://{f'[{host}]' if ':' in host else host}:{port}"
        # More prompts than may wait would always be too many.
        config = dataclasses.replace(config, max_prompts=min(config.max_prompts, engine.config.schedule.max_queue_size))
        app = create_app(LocalBackend(engine), engine.tokenizer, config, log, batches)
        GracefulServer(app, config, on_started=lambda: console.print(message, highlight=False)).run(sockets=[listener])
    return 0


def _server_config(arguments: argparse.Namespace) -> ServerConfig:
    fields = given(arguments, dataclasses.fields(ServerConfig))
    if keys := os.environ.get(KEYS_VARIABLE):
        fields.setdefault("api_keys", tuple(key.strip() for key in keys.split(",")))
    if keys := os.environ.get(PRIORITY_KEYS_VARIABLE):
        fields.setdefault("priority_keys", tuple(key.strip() for key in keys.split(",")))
    models = EngineConfig.of(**given(arguments, flat_fields())).model
    fields.setdefault("served_model_name", _names_of(models.model))
    if models.embedding_model is not None:
        fields.setdefault("served_embedding_name", _names_of(models.embedding_model))
    return ServerConfig(**fields)


def _names_of(model: str) -> tuple[str, ...]:
    """A model's short name and, unless it is a path, which is nobody else's business, what was given for it."""
    if model in SERVED_AS:
        return SERVED_AS[model]
    path = Path(model)
    name = path.resolve().name.removesuffix(".gguf")
    return (name,) if path.is_absolute() or path.exists() else tuple(dict.fromkeys((name, model)))


def _listening_socket(config: ServerConfig) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"can't listen on {config.host} port {config.port}: {error}; choose others with --host and --port") from error
    return listener


def _batch(arguments: argparse.Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from server.batches.offline import BatchStopped, check_files, run_batch
    from server.local_backend import LocalBackend
    from server.openai.service import Service

    console = Console(stderr=True)
    num_lines = check_files(arguments.input, arguments.output)  # before the long start, which a wrong name would waste
    engine = _start_engine(arguments, console)
    config = ServerConfig(served_model_name=_names_of(engine.config.model.model))
    backend = LocalBackend(engine)
    service = Service(backend, engine.tokenizer, config, int(time.time()))
    schedule = engine.config.schedule
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())

    async def run() -> str:
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("requests", total=num_lines)
            await backend.start()
            concurrency = min(2 * schedule.max_batch_size, schedule.max_queue_size)
            try:
                result = await run_batch(
                    service, arguments.input, arguments.output, concurrency=concurrency, advance=lambda count: progress.advance(bar, count)
                )
            finally:
                await backend.stop()
        return f"{result.num_answered} answered, {result.num_failed} of them with an error; {result.num_kept} kept from before"

    try:
        console.print(asyncio.run(run()))
    except BatchStopped as error:
        console.print(f"jaxinfer: error: {error}; the answers so far are in {arguments.output}: run the same command again for the rest")
        return 1
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Orbax starts JAX, which would take a GPU that others may be using
    from checkpoints.convert import check_destination, convert
    from checkpoints.hub import open_source, resolve
    from checkpoints.outgoing import DTYPES, outgoing
    from jaxinfer.tokenizer import Tokenizer

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what is meant to be so
    shard_size = parse_bytes("shard_size", arguments.shard_size)
    check_destination(arguments.destination, arguments.force)  # before a long download, which a wrong name would waste
    console = Console(stderr=True)
    source = open_source(resolve(arguments.source))
    tensors = outgoing(source, None if arguments.dtype is None else DTYPES[arguments.dtype])
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("weights", total=num_bytes)
        convert(
            source,
            tensors,
            arguments.destination,
            arguments.format,
            shard_size=shard_size,
            save_tokenizer=lambda file: Tokenizer.from_source(source).save(file),
            is_forced=arguments.force,
            advance=lambda written: progress.advance(bar, written),
        )
    console.print(f"{len(tensors):,} tensors, {num_bytes / 1e6:,.1f} MB, are in {arguments.destination}", highlight=False, soft_wrap=True)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # models are built abstractly: no GPU is needed
    from checkpoints.hub import resolve
    from server.inspection import inspect

    inspection = inspect(resolve(arguments.source))
    print(json.dumps(inspection.json(), indent=2) if arguments.json else "\n".join(inspection.lines()))
    return 0


if __name__ == "__main__":
    main()
