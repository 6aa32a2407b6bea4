"""`jaxinfer inspect`: the contents of a checkpoint, and whether it can be served or why not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.inventory import PARTS, Inventory, TensorEntry, groups, take_inventory
from checkpoints.source import CheckpointError
from jaxinfer.architecture.model_config import UnsupportedModelError
from jaxinfer.checkpoint_check import served_as

_WIDTH = 100
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Inspection:
    inventory: Inventory
    served_as: str | None  # the flag that accepts it, such as --model; None: it can't be served
    unsupported_reason: str | None  # why it can't be served

    def json(self) -> dict[str, Any]:
        """For programs: sizes in bytes and tokens, every tensor by itself."""
        inventory = self.inventory
        return {
            "path": str(inventory.path),
            "format": inventory.format,
            "num_files": len(inventory.files),
            "architecture": inventory.architecture,
            "num_parameters": inventory.num_parameters if inventory.source else None,
            "context": inventory.context,
            "tokenizer": inventory.tokenizer,
            "has_chat_template": inventory.has_chat_template,
            "served_as": self.served_as,
            "why_not": self.unsupported_reason,
            "num_bytes": inventory.num_bytes,
            "bytes_by_part": {part: _bytes(tensors) for part, tensors in self._by_part().items()},
            "tensors": [
                {"name": t.name, "shape": t.shape, "type": t.type, "num_bytes": t.num_bytes, "part": t.part} for t in inventory.tensors
            ],
        }

    def lines(self) -> Iterator[str]:
        """For people: a line each."""
        inventory = self.inventory
        files = f"{len(inventory.files):,} files of together" if len(inventory.files) > 1 else "1 file of"
        size = _size(sum(file.stat().st_size for file in inventory.files))
        count = f"{len(inventory.tensors):,} tensors"
        about = {
            "path": str(inventory.path),
            "format": f"{inventory.format}, {files} {size}",
            "architecture": inventory.architecture or "config.json names none",
            "parameters": f"{inventory.num_parameters:,} in {count}" if inventory.source else f"unknown, {count} as the files have them",
            "context": "unknown" if inventory.context is None else f"{inventory.context:,} tokens",
            "tokenizer": inventory.tokenizer or "none",
            "chat template": "yes" if inventory.has_chat_template else "none",
            "can be served": f"yes, as {self.served_as}" if self.served_as else f"no: {self.unsupported_reason}",
        }
        margin = max(map(len, about)) + 2
        for name, value in about.items():
            yield from textwrap.wrap(
                value,
                _WIDTH,
                initial_indent=name.ljust(margin),
                subsequent_indent=" " * margin,
                break_long_words=False,
                break_on_hyphens=False,
            )
        yield ""
        yield from self._table()

    def _table(self) -> Iterator[str]:
        """A name that leaves no room for the columns after it has a line of its own."""
        rows = [row for part, tensors in self._by_part().items() for row in self._rows(part, tensors)]
        rows.append(("all tensors", "", "", _size(self.inventory.num_bytes), ""))
        names, *columns = ([len(row[column]) for row in rows] for column in range(5))
        shape, type_, size, share = map(max, columns)
        width = min(max(names), _WIDTH - sum((shape, type_, size, share)) - 4 * len(_GAP))
        for name, *cells in rows:
            if len(name) > width:
                yield name
                name = ""
            aligned = (f"{name:{width}}", f"{cells[0]:>{shape}}", f"{cells[1]:{type_}}", f"{cells[2]:>{size}}", f"{cells[3]:>{share}}")
            yield _GAP.join(aligned).rstrip()

    def _rows(self, part: str, tensors: Sequence[TensorEntry]) -> Iterator[tuple[str, str, str, str, str]]:
        num_bytes = _bytes(tensors)
        share = num_bytes / max(self.inventory.num_bytes, 1)
        yield part, "", "", _size(num_bytes), "<1%" if share < 0.005 else f"{share:.0%}"
        for group in groups(tensors):
            alike = group.tensors
            count = f"{len(alike):,} x " if len(alike) > 1 else ""
            yield f"  {group.name}", f"{count}{list(alike[0].shape)}", alike[0].type, _size(_bytes(alike)), ""

    def _by_part(self) -> dict[str, list[TensorEntry]]:
        found: dict[str, list[TensorEntry]] = {part: [] for part in PARTS}
        for tensor in self.inventory.tensors:
            found[tensor.part].append(tensor)
        return {part: tensors for part, tensors in found.items() if tensors}


def inspect(path: Path) -> Inspection:
    """Inspects what `hub.resolve` returned. Reads no weights. Raises `CheckpointError` for files that are missing or
    broken."""
    inventory = take_inventory(path)
    if inventory.source is None:
        return Inspection(inventory, None, inventory.unsupported_reason)
    try:
        return Inspection(inventory, served_as(inventory.source), None)
    except (CheckpointError, UnsupportedModelError) as error:
        return Inspection(inventory, None, str(error))


def _bytes(tensors: Iterable[TensorEntry]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _size(num_bytes: float) -> str:
    """1536 -> '1.5 kB', in metric units, as hubs list files."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5 or unit == "GB":
            return f"{num_bytes:,.0f} {unit}" if unit == "B" or num_bytes >= 99.5 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError
