"""`jaxinfer inspect` and `convert`: what a checkpoint holds, readable at 100 columns; whether it can be served, and the same reasons why not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.hub import open_source
from checkpoints.inventory import TensorEntry
from server import cli
from server.inspection import Inspection, inspect
from tests import tiny_encoder, tiny_model
from tests.checkpoints import tiny


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # so that the commands, which set it, leave nothing behind


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit:
        cli.main([str(argument) for argument in arguments])
    assert isinstance(exit.value.code, int)
    return exit.value.code


def test_a_model_is_told_of_in_lines_that_are_aligned_and_fit(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", tiny_model_path) == 0
    lines = capsys.readouterr().out.splitlines()
    about, table = lines[: lines.index("")], lines[lines.index("") + 1 :]
    num_parameters = sum(array.size for array in tiny_model.tensors().values())
    size = (tiny_model_path / "model.safetensors").stat().st_size / 1000
    assert [line.split(maxsplit=1) if " " in line else [line] for line in about[1:]] == [
        ["format", f"safetensors, 1 file of {size:.0f} kB"],
        ["architecture", "LlamaForCausalLM"],
        ["parameters", f"{num_parameters:,} in 21 tensors"],
        ["context", "512 tokens"],
        ["tokenizer", "tokenizer.json"],
        ["chat", "template  yes"],
        ["can", "be served  yes, as --model"],
    ]
    assert "  model.layers.{0..1}.mlp.down_proj.weight             2 x [64, 128]  float32  65.5 kB" in table
    assert table[0].split() == ["embedding", "131", "kB", "23%"]
    assert table[-1].split() == ["all", "tensors", f"{num_parameters * 4 / 1000:.0f}", "kB"]
    assert max(map(len, lines)) <= 100
    ends = {line.index("float32") for line in table if "float32" in line}
    assert len(ends) == 1


def test_names_too_long_for_a_line_have_one_of_their_own(tiny_model_path: Path) -> None:
    long = "language_model.model.layers.{}.mlp.experts.{}.down_projection_of_this_expert.weight"
    tensors = [TensorEntry(long.format(i, j), (7168, 2048), "FP8 128x128", 2**24) for i in range(60) for j in range(256)]
    inventory = dataclasses.replace(
        inspect(tiny_model_path).inventory, tensors=(*tensors, TensorEntry("norm", (7168,), "float32", 4 * 7168))
    )
    lines = list(Inspection(inventory, None, "of a reason " * 20).lines())
    assert max(map(len, lines)) <= 100
    name = lines.index("  " + long.format("{0..59}", "{0..255}"))
    assert lines[name + 1].split() == ["15,360", "x", "[7168,", "2048]", "FP8", "128x128", "258", "GB"]
    assert lines[name + 1].index("FP8") == next(line for line in lines if "float32" in line).index("float32")


def test_programs_get_every_tensor_and_sizes_in_bytes(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", tiny_model_path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    arrays = tiny_model.tensors()
    assert (told["format"], told["architecture"], told["context"], told["served_as"], told["why_not"]) == (
        "safetensors",
        "LlamaForCausalLM",
        512,
        "--model",
        None,
    )
    assert {tensor["name"]: (tuple(tensor["shape"]), tensor["num_bytes"]) for tensor in told["tensors"]} == {
        name: (array.shape, array.nbytes) for name, array in arrays.items()
    }
    assert sum(told["bytes_by_part"].values()) == told["num_bytes"] == 4 * told["num_parameters"]


def test_no_weights_are_read(tiny_model_path: Path) -> None:
    source = inspect(tiny_model_path).inventory.source
    assert source is not None
    assert source.bytes_read == 0


def test_an_encoder_is_served_by_another_flag(tmp_path: Path) -> None:
    assert inspect(tiny_encoder.write(tmp_path / "encoder")).served_as == "--embedding-model"


def _configured(**config: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(tiny_model.CONFIG | config))

    return change


def _with_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        arrays = load_file(folder / "model.safetensors")
        change(arrays)
        save_file(arrays, folder / "model.safetensors")

    return written


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "unsupported_reason"),
    [
        (_configured(architectures=["MambaForCausalLM"]), "architectures is ['MambaForCausalLM']: supported are DeepseekV3ForCausalLM"),
        (_configured(hidden_act="relu"), "hidden_act is 'relu'"),
        (_configured(quantization_config={"quant_method": "aqlm"}), "quantization_config.quant_method is 'aqlm'"),
        (_configured(num_hidden_layers=3), "'model.layers.2.input_layernorm.weight'"),
        (_with_tensors(lambda arrays: arrays.pop(NORM)), f"tensor '{NORM}' is missing, which this model's configuration calls for"),
        (
            _with_tensors(lambda arrays: arrays.update(extra=np.ones(2, np.float32))),
            "tensor 'extra' is in the checkpoint but not in a model",
        ),
        (_with_tensors(lambda arrays: arrays.update({NORM: np.ones(9, np.float32)})), f"tensor '{NORM}' has shape [9], but"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    ],
)
def test_what_can_not_be_served_is_told_of_with_the_reason(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None], unsupported_reason: str
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "m")
    change(folder)
    assert run("inspect", folder) == 0
    lines = capsys.readouterr().out
    shown = " ".join(lines[: lines.index("\n\n")].split())
    assert f"can be served no: {inspect(folder).unsupported_reason}" in shown
    assert unsupported_reason in shown
    assert "model.layers.{0..1}.mlp.down_proj.weight" in lines


def test_a_model_goes_through_every_format_on_the_command_line(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("convert", tiny_model_path, tmp_path / "orbax", "--format", "orbax") == 0
    assert run("convert", tmp_path / "orbax", tmp_path / "half", "--dtype", "bfloat16", "--shard-size", "100KB") == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("21 tensors, 0.3 MB, are in ")
    assert inspect(tmp_path / "orbax").served_as == inspect(tmp_path / "half").served_as == "--model"
    half = open_source(tmp_path / "half")
    for name, array in tiny_model.tensors().items():
        assert half.read(name).tobytes() == array.astype(half.read(name).dtype).tobytes()
        assert half.stored(name).format == "BF16"
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 2


def test_a_gguf_file_gets_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf")
    assert run("convert", tmp_path / "tiny.gguf", tmp_path / "folder") == 0
    assert (tmp_path / "folder" / "tokenizer.json").is_file()
    assert inspect(tmp_path / "folder").served_as == "--model"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect", "no-such-model"), "model 'no-such-model' does not exist"),
        (("inspect", "{model}/.."), "config.json: missing"),
        (("inspect", "{folder}/broken.gguf"), "broken.gguf: not a GGUF file"),
        (("convert", "no-such-model", "{folder}/new"), "model 'no-such-model' does not exist"),
        (("convert", "org/none", "{folder}"), "exists and is not empty: give another folder, or --force"),
        (("convert", "{model}", "{folder}/new", "--shard-size", "big"), "shard_size is 'big'"),
        (("convert", "{model}", "{model}", "--force"), "is where the checkpoint to convert lies"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "broken.gguf").write_text("no model at all")
    assert run(*(argument.format(folder=tmp_path, model=tiny_model_path) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxinfer: error: ")
    assert error.count("\n") == 1
    assert says in error
    assert [file.name for file in tmp_path.iterdir()] == ["broken.gguf"]
