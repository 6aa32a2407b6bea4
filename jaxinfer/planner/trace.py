"""Traces of real services: arrival times and lengths of requests. Reads Mooncake's JSON lines and Azure's CSV. Imports
no JAX.

Mooncake's ("Trading More Storage for Less Computation", Qin et al., FAST'25, https://github.com/kvcache-ai/Mooncake)
have a hash for each block of 512 prompt tokens, equal for equal tokens after an equal prefix. Azure's have lengths only
(https://github.com/Azure/AzurePublicDataset, LLM inference 2023 and 2024)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from jaxinfer.config import ConfigError

BLOCK = 512  # prompt tokens that a hash stands for
FORMATS = (
    'give Mooncake\'s JSON lines, such as {"timestamp": 27000, "input_length": 1100, "output_length": 343, "hash_ids": [0, 17, 40]}, or Azure\'s CSV '
    "with the columns TIMESTAMP,ContextTokens,GeneratedTokens"
)
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ConfigError):
    """A trace that can't be used; the message names the file, and the line if one is wrong."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]  # one for each block of the prompt

    @property
    def session(self) -> tuple[int, ...]:
        """Identifies a conversation: its first two blocks. The first alone is the system prompt, which nearly all
        requests share."""
        return self.hash_ids[:2]


def read_trace(path: Path, *, only_lengths: bool = False) -> list[TraceRequest]:
    """Requests in order of arrival. Those of a CSV share no block: each has unique negative hashes. With `only_lengths`
    JSON lines need no "timestamp" and "hash_ids". Raises `TraceError` for a file of another format, an invalid line,
    and a trace without requests."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            is_csv = set(_COLUMNS) <= {name.strip() for name in first.split(",")}
            if first and not is_csv and not first.lstrip().startswith("{"):
                raise TraceError(f"trace is {path}: its first line is neither a JSON object nor has these columns: {FORMATS}")
            file.seek(0)
            requests = list(_azure(path, file) if is_csv else _mooncake(path, file, only_lengths))
    except OSError as error:
        raise TraceError(f"trace is {path}: it can't be read: {error.strerror}; {FORMATS}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"trace is {path}: it is no text in UTF-8, or no CSV ({error}): {FORMATS}") from error
    if not requests:
        raise TraceError(f"trace is {path}: it has no requests: {FORMATS}")
    return sorted(requests, key=lambda request: request.timestamp)


def _mooncake(path: Path, lines: TextIO, only_lengths: bool) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _mooncake_request(json.loads(line), only_lengths)
            except (ValueError, KeyError, TypeError) as error:
                what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                raise TraceError(f"trace is {path}: line {number} is no request: {what}; {FORMATS}") from error


def _mooncake_request(row: dict[str, Any], only_lengths: bool) -> TraceRequest:
    input_length, output_length = row["input_length"], row["output_length"]
    for name, length in (("input_length", input_length), ("output_length", output_length)):
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(f"{name} is {length!r}, which must be an integer of at least 1")
    if only_lengths:
        return TraceRequest(0.0, input_length, output_length, ())
    request = TraceRequest(float(row["timestamp"]), input_length, output_length, tuple(map(int, row["hash_ids"])))
    if len(request.hash_ids) != _num_blocks(input_length):
        raise ValueError(f"{len(request.hash_ids)} hashes for {input_length} tokens: one for each {BLOCK} is right")
    return request


def _azure(path: Path, lines: TextIO) -> Iterator[TraceRequest]:
    next_hash = -1
    for row in (reader := csv.DictReader(lines, skipinitialspace=True)):
        try:
            at, input_length, output_length = (row[name] for name in _COLUMNS)
            time = datetime.fromisoformat(at)
            # A request without output tokens still waited for one.
            sizes = int(input_length), max(int(output_length), 1)
        except (ValueError, TypeError) as error:
            raise TraceError(f"trace is {path}: line {reader.line_num} is no request: {error}; {FORMATS}") from error
        if sizes[0] < 1 or int(output_length) < 0:
            raise TraceError(
                f"trace is {path}: line {reader.line_num} has {input_length} and {output_length} tokens: give at least 1 and 0"
            )
        hash_ids = tuple(range(next_hash, next_hash - _num_blocks(sizes[0]), -1))
        next_hash = hash_ids[-1] - 1
        yield TraceRequest((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e3, *sizes, hash_ids)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)
