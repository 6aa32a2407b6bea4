"""A converted model answers as the one that it was made from, on any mesh; nor is its cache anyone else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.convert import convert
from checkpoints.converted_tensors import converted_tensors
from checkpoints.digest import weights_digest
from checkpoints.hub import open_source
from jaxinfer import SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.tokenizer import Tokenizer
from tests.conftest import TINY

PROMPTS = ["the rain in Spain", "a", "one two three four five six seven eight nine ten"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def orbax(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "orbax"
    source = open_source(tiny_model_path)
    convert(source, converted_tensors(source, None), folder, "orbax", shard_size=10**9, save_tokenizer=Tokenizer.from_source(source).save)
    return folder


@pytest.mark.parametrize("devices", [{}, {"prefill_devices": (0, 1), "decode_devices": (2,)}])
def test_a_model_of_orbax_answers_with_the_same_tokens(llm: LLM, orbax: Path, devices: dict[str, tuple[int, ...]]) -> None:
    other = LLM(str(orbax), **(TINY | devices))
    expected = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS)]
    assert [result.outputs[0].token_ids for result in other.generate(PROMPTS, PARAMS)] == expected
    chat = [{"role": "user", "content": "hello"}]
    assert other.chat(chat, PARAMS).outputs[0].token_ids == llm.chat(chat, PARAMS).outputs[0].token_ids


def test_other_weights_are_told_apart(orbax: Path) -> None:
    before = weights_digest(orbax)
    file = max((file for file in (orbax / "weights").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    changed = weights_digest(orbax)
    file.write_bytes(whole)
    assert changed != before == weights_digest(orbax)
