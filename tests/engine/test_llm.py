"""LLM: the offline way in."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.request import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_results_come_in_the_prompts_order_with_text_and_ids(llm):
    prompts = ["one", [1, 2, 3], "a rather longer one than the others", "two"]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (30, 1, 5, 12)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == ["one", None, prompts[2], "two"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 1, 5, 12]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == (llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        [sequence] = output.outputs
        assert sequence.text == llm.tokenizer.decode(sequence.token_ids)
        assert (sequence.finish_reason, sequence.logprobs) == ("length", None)


def test_one_prompt_may_be_given_alone(llm):
    [text], [ids] = llm.generate("hello", GREEDY), llm.generate(llm.tokenizer.encode("hello"), GREEDY)
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids
    [array] = llm.generate(np.array(llm.tokenizer.encode("hello")), GREEDY)
    assert array.outputs[0].token_ids == ids.outputs[0].token_ids
    several = llm.generate(np.array([[1, 2], [3, 4]]), GREEDY)
    assert [output.prompt_token_ids for output in several] == [[1, 2], [3, 4]]


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt, add_special_tokens=False)
    assert output.prompt_token_ids[0] == llm.tokenizer.encode("<|im_start|>")[0]
    first, second = llm.chat([messages, [*messages, {"role": "assistant", "content": "yes?"}, messages[0]]], GREEDY)
    assert first.outputs[0].token_ids == output.outputs[0].token_ids
    assert second.prompt.count("<|im_start|>") == 4
    with pytest.raises(RequestError):
        llm.chat([], GREEDY)
    with pytest.raises(RequestError, match="tools can't be a variable"):
        llm.chat(messages, GREEDY, chat_template_kwargs={"tools": []})
    assert llm.chat(messages, GREEDY, tools=[], add_generation_prompt=False).prompt == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_long_call_shows_its_progress_unless_told_not_to(llm, capsys):
    short = SamplingParams(max_tokens=1)
    llm.generate(["x"] * 16, short)
    assert "16/16" in "".join(capsys.readouterr())
    llm.generate(["x"] * 16, short, progress=False)
    llm.generate(["x"] * 3, short)
    assert "".join(capsys.readouterr()) == ""


def test_progress_stays_out_of_standard_output(llm, capsys):
    llm.generate(["x"] * 2, SamplingParams(max_tokens=1), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


def test_the_same_call_again_gives_the_same(llm):
    assert [o.outputs[0].token_ids for o in llm.generate(["x", "y"], GREEDY)] == [
        o.outputs[0].token_ids for o in llm.generate(["x", "y"], GREEDY)
    ]


def test_made_up_weights_need_only_the_models_shapes(tiny_model_path, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_model_path / name).read_bytes())
    made_up = LLM(str(tmp_path), random_weights=True, max_batch_size=8, decode_buckets=(8,), prefill_buckets=(128,), prefill_chunk_size=128)
    [output] = made_up.generate(["x"], GREEDY)
    assert len(output.outputs[0].token_ids) == 12
