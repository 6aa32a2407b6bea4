"""What tells one checkpoint's weights from another's."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints.digest import weights_digest


@pytest.fixture
def folder(tmp_path):
    """Two parts of 3 MB, and what says nothing about the weights."""
    random = np.random.default_rng(0)
    for number in range(2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(random.bytes(3_000_000))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def change(path, position, value):
    data = bytearray(path.read_bytes())
    data[position] = value
    path.write_bytes(data)


def test_a_digest_is_the_same_wherever_the_files_lie(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for file in folder.iterdir():
        (elsewhere / file.name).write_bytes(file.read_bytes())
    (elsewhere / "README.md").write_text("a copy")
    assert weights_digest(elsewhere) == weights_digest(folder)
    assert len(weights_digest(folder)) == 32


@pytest.mark.parametrize("position", [0, 1_500_000, 2_999_999])
@pytest.mark.parametrize("part", [0, 1])
def test_every_byte_of_every_part_counts(folder, part, position):
    before, file = weights_digest(folder), folder / f"model-{part}.safetensors"
    old = file.read_bytes()[position]
    change(file, position, old ^ 1)
    assert weights_digest(folder) != before
    change(file, position, old)
    assert weights_digest(folder) == before


def test_parts_that_changed_places_are_other_weights(folder):
    before = weights_digest(folder)
    first, second = (folder / f"model-{number}.safetensors" for number in range(2))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    assert weights_digest(folder) != before


def test_one_file_alone_has_a_digest(folder):
    file = folder / "model-0.safetensors"
    before = weights_digest(file)
    change(file, 7, file.read_bytes()[7] ^ 1)
    assert weights_digest(file) != before
