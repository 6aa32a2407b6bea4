"""Command-line flags made from the fields of the configurations, so that a default and its help live in one place."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

Field = dataclasses.Field[Any]


def add_flags(parser: argparse.ArgumentParser, title: str, fields: Iterable[Field], repeated: Collection[str] = ()) -> None:
    """Adds one flag to `parser` for each field, named after it, but for those that a command sets itself. A flag that
    isn't given leaves no entry in the namespace. Those of the `repeated` fields may be given several times, and leave a
    list."""
    group = parser.add_argument_group(title)
    options: dict[str, Any]
    for field in fields:
        kind = str(field.type)
        if not field.metadata.get("has_flag", True):
            continue
        if "instead" in field.metadata:
            options = {"dest": field.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            group.add_argument(_name(field), action=_RefuseFlag, nargs="?", const=field.metadata["instead"], **options)
            continue
        help = f"{field.metadata['help']} (default: {_shown(field.default)})".replace("%", "%%")
        name = _name(field)
        options = {"dest": field.name, "default": argparse.SUPPRESS, "help": help}
        if kind == "bool":
            group.add_argument(name, action=argparse.BooleanOptionalAction, **options)
            continue
        reader, metavar = _READERS[kind]
        choices = field.metadata.get("choices")
        if field.name in repeated:
            options["action"] = "append"
        elif field.name == "model":
            options["action"] = OnlyOne
        group.add_argument(name, type=reader, choices=choices, metavar=None if choices else metavar, **options)


def _name(field: Field) -> str:
    return "--" + field.name.replace("_", "-")


class _RefuseFlag(argparse.Action):
    """A flag that must not be used: ends the command and says what to give instead."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None) -> None:
        parser.error(f"{option_string} would show secrets to every user of this machine: give {self.const}")


class OnlyOne(argparse.Action):
    """A model's flag where a command takes one: a second model ends the command, and isn't taken for the first."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None) -> None:
        given = f"{self.dest}_is_given"
        if hasattr(namespace, given):
            parser.error(
                f"{option_string} is given more than once: one process of this command has one model; `jaxinfer serve` takes several"
            )
        setattr(namespace, self.dest, values)
        setattr(namespace, given, True)


def given_flags(arguments: argparse.Namespace, fields: Iterable[Field]) -> dict[str, Any]:
    """The fields' values that were given on the command line."""
    return {field.name: getattr(arguments, field.name) for field in fields if hasattr(arguments, field.name)}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _strings(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


_integers.__name__, _strings.__name__ = "list of integers", "list"  # as argparse's errors name them

_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "TEXT"),
    "str | None": (str, "TEXT"),
    "int": (int, "N"),
    "int | None": (int, "N"),
    "float": (float, "X"),
    "float | None": (float, "X"),
    "tuple[int, ...]": (_integers, "N,N"),
    "tuple[str, ...]": (_strings, "A,B"),
}


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else str(default)
