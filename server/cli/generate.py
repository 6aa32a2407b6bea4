"""`jaxinfer generate`: answer one prompt on the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from jaxinfer.config import flat_fields
from server.cli.engine_start import engine_config, start_engine
from server.flags import add_flags

if TYPE_CHECKING:
    from jaxinfer.request import OutputDelta
    from server.summary import RequestTiming


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, the sampling flags, and the engine's settings."""
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    add_generation_flags(parser)
    parser.add_argument("--stats", action="store_true", help="print devices, times, speed and memory afterwards")
    add_flags(parser, "engine", flat_fields())


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """How one answer is sampled, and when it ends."""
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


def run(arguments: argparse.Namespace, write: Callable[[str], object] | None = None) -> int:
    """Streams the answer to standard output, or text by text to `write`; all else to standard error."""
    from jaxinfer.request import RequestError, SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos")
    params = SamplingParams(**{name: getattr(arguments, name) for name in names})
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise RequestError("the prompt is empty: give some text")
    _size_for_one_answer(arguments)
    config = engine_config(arguments)
    from rich.console import Console

    from server.summary import summary_table

    console = Console(stderr=True)
    engine = start_engine(config, console)
    from jaxinfer.engine_loop import EngineLoop
    from jaxinfer.engine_thread import NewRequest

    with closing(EngineLoop(engine)) as engine_loop:  # it closes the engine too; Ctrl+C ends a wait, never a step
        if arguments.chat:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            prompt = engine.tokenizer.render_chat([*system, {"role": "user", "content": prompt}])
        token_ids = engine.tokenizer.encode(prompt, add_special_tokens=not arguments.chat)
        deltas = engine_loop.stream(NewRequest("generate", engine.validate(token_ids, params), params))
        measured = _stream_to_terminal(deltas, len(token_ids), write or _to_stdout)
    if arguments.stats:
        console.print()
        console.print(summary_table(engine.stats, measured))
    return 0


def _size_for_one_answer(arguments: argparse.Namespace) -> None:
    """Only programs that one sequence uses are compiled, unless sizes were given."""
    if not hasattr(arguments, "max_batch_size") and not hasattr(arguments, "decode_buckets"):
        arguments.max_batch_size, arguments.decode_buckets = 1, (1,)


def _to_stdout(text: str) -> None:
    print(text, end="", flush=True)


def _stream_to_terminal(deltas: Iterator[OutputDelta], num_prompt_tokens: int, write: Callable[[str], object]) -> RequestTiming:
    from server.summary import RequestTiming

    start = time.perf_counter()
    first = last = None
    num_tokens = 0
    for delta in deltas:
        write(delta.text)
        num_tokens += len(delta.token_ids)
        if delta.token_ids:
            last = time.perf_counter()
            first = first or last
    write("\n")
    first, last = first or start, last or start
    return RequestTiming(num_prompt_tokens, num_tokens, first - start, last - first)
