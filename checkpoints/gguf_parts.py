"""A GGUF split in parts, as llama-gguf-split writes them: NAME-00001-of-00003.gguf and so on; any one of them
identifies all."""

from __future__ import annotations

import re
from pathlib import Path

from checkpoints.gguf_file import GGUFFile
from checkpoints.source import CheckpointError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """The paths of all parts of a split file, by its name; for another file its own path."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    return [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder, or the first of its parts; None where there is none. Raises `CheckpointError` for
    several."""
    found = sorted({part_paths(file)[0] for file in folder.glob("*.gguf")})
    if len(found) > 1:
        raise CheckpointError(f"{folder}: {len(found)} GGUF models ({', '.join(file.name for file in found)}): give the file of one")
    return found[0] if found else None


def open_parts(path: Path) -> list[GGUFFile]:
    """The file, or in order all the parts of a split one. Raises `CheckpointError` for one that is missing or of
    another model."""
    given = GGUFFile(path)
    count, paths = given.metadata.get("split.count", 1), part_paths(path)
    if not isinstance(count, int):
        raise CheckpointError(f"{path}: split.count is {count!r}, not a number; fetch or convert the file again")
    if count <= 1:
        return [given]
    if count != len(paths):
        raise CheckpointError(
            f"{path}: one of {count} parts by its metadata: each must be called NAME-00001-of-{count:05}.gguf and so on; give it the name "
            "that it had, or merge them (llama-gguf-split --merge)"
        )
    if missing := [part.name for part in paths if not part.exists()]:
        raise CheckpointError(
            f"{path}: of its {count} parts {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: fetch them"
        )
    files = [given if part == path else GGUFFile(part) for part in paths]
    of_name: dict[str, Path] = {}
    for number, file in enumerate(files):
        place = f"split.no is {file.metadata.get('split.no')} and split.count {file.metadata.get('split.count')}"
        if place != (wanted := f"split.no is {number} and split.count {count}"):
            raise CheckpointError(f"{file.path}: {place} where {wanted} should be: not this part; fetch it again")
        for name in file.tensors:
            if name in of_name:
                raise CheckpointError(f"{file.path}: tensor {name!r} is in {of_name[name].name} too; fetch the parts again")
            of_name[name] = file.path
    total = files[0].metadata.get("split.tensors.count", len(of_name))
    if str(total) != str(len(of_name)):
        raise CheckpointError(f"{path}: its parts hold {len(of_name)} tensors, not the {total} of split.tensors.count; fetch them again")
    return files
