"""GGUF files: values, names, row order, slices, configuration; and every broken one refused with its name and a way out."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.gguf_source import GGUFSource
from checkpoints.source import CheckpointError
from jaxinfer.tokenizer import Tokenizer
from tests.checkpoints import tiny

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def q8_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, tiny.write_gguf(path)


@pytest.mark.parametrize("type_", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_1])
def test_every_tensor_reads_back_under_its_hugging_face_name(tmp_path: Path, type_: Type) -> None:
    expected = tiny.write_gguf(tmp_path / "tiny.gguf", type_)
    source = GGUFSource(tmp_path / "tiny.gguf")
    assert set(source.names()) == set(expected)
    for name, values in expected.items():
        assert source.shape(name) == values.shape
        np.testing.assert_array_equal(source.read(name).astype(np.float32), values, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_slice_is_that_part_of_the_whole(q8_file: tuple[Path, dict[str, np.ndarray]], data: st.DataObject) -> None:
    path, expected = q8_file
    source = GGUFSource(path)
    name = data.draw(st.sampled_from(sorted(expected)))
    index = []
    for size in expected[name].shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    np.testing.assert_array_equal(source.read(name, tuple(index)), expected[name][tuple(index)])


def test_only_the_bytes_of_the_rows_asked_for_are_read(q8_file: tuple[Path, dict[str, np.ndarray]]) -> None:
    source = GGUFSource(q8_file[0])
    row = tiny.HIDDEN // 32 * 34  # Q8_0: 34 bytes for 32 values
    source.read("model.layers.0.mlp.up_proj.weight", (slice(24, 48), slice(None)))
    assert source.bytes_read == 24 * row
    source.read(QUERY, (slice(tiny.HEAD, 3 * tiny.HEAD), slice(None)))  # whole heads
    assert source.bytes_read == (24 + 2 * tiny.HEAD) * row


def test_the_configuration_is_hugging_faces(q8_file: tuple[Path, dict[str, np.ndarray]]) -> None:
    config = GGUFSource(q8_file[0]).config
    assert {key: config[key] for key in tiny.CONFIG} == tiny.CONFIG
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)


def test_a_separate_head_and_biases_are_seen(tmp_path: Path) -> None:
    bias = np.arange(tiny.HEADS * tiny.HEAD, dtype=np.float32)
    extra = {"output.weight": np.ones((tiny.VOCAB, tiny.HIDDEN), np.float32), "blk.0.attn_q.bias": bias}
    tiny.write_gguf(tmp_path / "tiny.gguf", extra=extra)
    source = GGUFSource(tmp_path / "tiny.gguf")
    assert source.config["tie_word_embeddings"] is False
    assert source.config["attention_bias"] is True
    assert source.shape("lm_head.weight") == (tiny.VOCAB, tiny.HIDDEN)
    # Interleaved like the weight's rows: even places hold a head's first half.
    first_head = source.read("model.layers.0.self_attn.q_proj.bias")[: tiny.HEAD]
    assert first_head.tolist() == [*range(0, tiny.HEAD, 2), *range(1, tiny.HEAD, 2)]


def _llama3_table(theta: float, head: int, factor: float) -> np.ndarray:
    """What llama.cpp's converter writes, in its scalar form."""
    table = []
    for i in range(0, head, 2):
        wavelength = 2 * np.pi * theta ** (i / head)
        if wavelength < 8192 / 4.0:
            table.append(1.0)
        elif wavelength > 8192 / 1.0:
            table.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


def test_llama_3_scaling_is_recognised_from_its_table(tmp_path: Path) -> None:
    metadata = {"llama.rope.freq_base": 500000.0}
    tiny.write_gguf(tmp_path / "a.gguf", metadata=metadata, extra={"rope_freqs.weight": _llama3_table(500000.0, tiny.HEAD, 8.0)})
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert GGUFSource(tmp_path / "a.gguf").config["rope_scaling"] == scaling
    tiny.write_gguf(
        tmp_path / "b.gguf", metadata=metadata, extra={"rope_freqs.weight": np.linspace(1, 3, tiny.HEAD // 2, dtype=np.float32)}
    )
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*safetensors instead"):
        GGUFSource(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture is 'mamba'.*'llama', 'gemma3', 'qwen2', 'qwen3', 'qwen3moe' are supported",
        ),
        ({"llama.block_count": None}, "'llama.block_count' is missing; fetch or convert"),
        ({"llama.attention.head_count": "nine"}, "head_count' is 'nine': it must be a positive integer"),
        ({"llama.attention.head_count": 5}, "q_proj.weight' has 64 rows, but its metadata says 5 heads of 16"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "is -1.0: it must be a positive number"),
        ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "head sizes of keys, values and RoPE differ"),
        ({"split.count": 3}, r"one of 3 parts by its metadata: each must be called NAME-00001-of-00003\.gguf"),
        ({"llama.attention.head_count": [4, 2]}, "differs from layer to layer"),
    ],
)
def test_metadata_that_can_not_be_served_is_refused_by_key(tmp_path: Path, metadata: dict, message: str) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFSource(tmp_path / "tiny.gguf")
    assert "tiny.gguf" in str(caught.value)


def test_a_quantisation_without_a_dequantiser_is_refused_by_tensor(q8_file: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    data = bytearray(q8_file[0].read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # after the name: the number of dimensions, then two of them
    assert data[at] == Type.Q8_0
    data[at] = Type.Q8_1  # blocks of 32 too, made for activations only
    (tmp_path / "odd.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight' has type Q8_1, which can't be dequantised: convert"):
        GGUFSource(tmp_path / "odd.gguf")
    data[at] = 200
    (tmp_path / "odd.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight' has unknown type 200"):
        GGUFSource(tmp_path / "odd.gguf")


def test_a_file_cut_anywhere_is_refused(q8_file: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    whole = q8_file[0].read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 1500, 61), *range(1500, len(whole), 4999), len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf.*again") as caught:
            GGUFSource(cut)
        assert len(str(caught.value)) < 400


def test_flipped_bytes_in_the_header_never_raise_anything_else(q8_file: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    whole, chance = q8_file[0].read_bytes(), random.Random(0)
    header = whole.index(b"blk.1.ffn_down.weight") + 60
    broken, refused = tmp_path / "broken.gguf", 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 4))):
            data[chance.randrange(header)] = chance.randrange(256)
        broken.write_bytes(data)
        try:
            source = GGUFSource(broken)
            Tokenizer.from_source(source)
            with np.errstate(all="ignore"):  # moved by some bytes, scales may be no numbers
                for name in source.names():
                    source.read(name)
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_no_gguf_and_no_file_say_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf: can't be read.*check the path"):
        GGUFSource(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    with pytest.raises(CheckpointError, match=r"not a GGUF file \(it starts with b'hell'\)"):
        GGUFSource(tmp_path / "text.gguf")


def test_an_unknown_tensor_name_is_an_error_with_the_name(q8_file: tuple[Path, dict[str, np.ndarray]]) -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'model\.nothing' is missing"):
        GGUFSource(q8_file[0]).read("model.nothing")
