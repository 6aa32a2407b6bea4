"""The command and its flags. A mistake is reported in two lines: usage, and what is wrong."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

Run = Callable[[argparse.Namespace], int]


class Command(NamedTuple):
    """Described here, so that a list of all commands imports none. The module of its name has `add_arguments(parser)`
    and `run(arguments)`, which returns the exit code."""

    help: str
    description: str


COMMANDS = {
    "serve": Command("OpenAI-compatible HTTP server and chat page", "Serve a model over HTTP."),
    "generate": Command("answer one prompt on the terminal", "Stream an answer to the terminal."),
    "demo": Command("generate with a ready prompt, then report what ran where", "A first look."),
    "batch": Command("answer a file of OpenAI batch requests", "Run a batch file; resumes where it ended."),
    "router": Command("one OpenAI endpoint in front of workers on any machines", "Route requests to workers."),
    "worker": Command("an engine that routers give prefill, decode, or both", "See docs/disaggregation.md."),
    "cluster": Command("pools of workers on Ray, of a size that follows their load", "See docs/disaggregation.md."),
    "top": Command("a live view of a router's workers, or of a server", "See what runs where."),
    "follow": Command("lend this process's devices to an engine that process 0 drives", "See docs/multi_process.md."),
    "compile": Command("an engine's programs, compiled once to be shipped", "See docs/program_cache.md."),
    "convert": Command("write a checkpoint in another format", "To a folder of safetensors or Orbax."),
    "compress": Command("a folder of safetensors in fewer bytes, without loss", "It can be served as it is; see docs/checkpoints.md."),
    "decompress": Command("what was compressed, byte for byte", "See docs/checkpoints.md."),
    "inspect": Command("what a checkpoint holds, and whether it can be served", "Reads no weights."),
    "plan": Command("what a model needs on target GPUs, which need not be here", "Needs no weights and no GPU."),
}


class CommandParser(argparse.ArgumentParser):
    """argparse's, with one line of usage for a mistake and the nearest flag for an unknown one."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def check_flags(self, arguments: Iterable[str]) -> None:
        """Exits for an unknown flag: argparse would report a missing argument first, which the flag explains."""
        known = self._option_string_actions
        for text in arguments:
            if text == "--":  # the rest are no flags
                return
            name = text.split("=", 1)[0]
            if re.match(r"--?[A-Za-z]", name) and " " not in name and name not in known:
                self.error(f"unknown flag {name}{_hint(name, known)}")

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        wanted = [str(action.metavar or action.dest) for action in self._get_positional_actions() if action.nargs != "?"]
        usage = " ".join([self.prog, *wanted, "[flags]"])
        message = message.replace("unrecognized arguments:", "unexpected argument")
        self.exit(2, f"usage: {usage} ({self.prog} --help lists all)\n{self.prog}: error: {message}\n")


def parse(arguments: Sequence[str]) -> tuple[Run, argparse.Namespace]:
    """The command's function and its arguments. Exits with status 2 on a mistake, 0 after `--help`."""
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        everything = CommandParser("jaxinfer", "JAX inference: prefill and decode as two programs on two meshes.")
        listed = everything.add_subparsers(metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser)
        for command, about in COMMANDS.items():
            listed.add_parser(command, help=about.help, description=about.description)
        everything.check_flags(arguments)
        if name and not name.startswith("-"):
            everything.error(f"unknown command {name!r}{_hint(name, COMMANDS)}")
        everything.parse_args(arguments)  # prints the help, or that a command is missing
    parser = CommandParser(f"jaxinfer {name}", COMMANDS[name].description)
    module = import_module(f"server.cli.{name}")
    module.add_arguments(parser)
    parser.check_flags(arguments[1:])
    return module.run, parser.parse_args(arguments[1:])


def _hint(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, 1)
    return f": did you mean {nearest[0]}?" if nearest else ""
