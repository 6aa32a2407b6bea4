"""Keys and values in float8: what they cost in accuracy, the same on every layout and way a page goes, and scales that fit the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.source import CheckpointError
from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.engine.fingerprint import fingerprint
from jaxinfer.kv_transfer.page_client import PageClient
from jaxinfer.kv_transfer.page_server import PageServer
from jaxinfer.models.base import run_slice
from jaxinfer.programs.compilation import TOTAL
from jaxinfer.reference_forward import _Everywhere
from jaxinfer.weights.kv_scales import rounded_up
from tests import tiny_model
from tests.conftest import TINY, MakeLLM
from tests.engine.test_remote_handoffs import Pair, check_all_free
from tests.engine.workload import workload
from tests.families.serving import serve

PROMPTS = workload()[0][:8]
SMALL: dict[str, Any] = {"max_batch_size": 8, "decode_buckets": (8,), "prefill_buckets": (128,)}
FLOAT8 = SMALL | {"kv_dtype": "fp8"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
CASES: dict[str, dict[str, Any]] = {
    "one device, chunks, tiers": {"prefill_chunk_size": 32, "prefill_buckets": (32,), "kv_memory": "20KiB", "kv_host_memory": "1MiB"},
    "XLA alone, pages of 4": {"attention_backend": "xla", "page_size": 4},
    "heads on four devices, to two stages": {
        "prefill_parallel": "tp=4",
        "prefill_devices": (0, 1, 2, 3),
        "decode_parallel": "pp=2",
        "decode_devices": (4, 5),
    },
}


def scored(llm: LLM, texts: list[list[int]]) -> list[np.ndarray]:
    """Log-probabilities of each text's tokens but the first."""
    outputs = llm.generate(texts, SCORED)
    return [np.array([one.logprob for one in output.prompt_logprobs if one is not None]) for output in outputs]


def generated(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[list[int], np.ndarray]]:
    """Greedy tokens, with what the engine that chose them says of each."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
    return [(list(one.token_ids), np.array([of_token.logprob for of_token in one.logprobs])) for one in outputs]


def check_alike(found: LLM, scorer: LLM, prompts: list[list[int]] = PROMPTS) -> None:
    """What one engine says of its tokens the other says too, but for values that lie at a border of two codes."""
    tokens = generated(found, prompts)
    scores = scored(scorer, [prompt + of_one for prompt, (of_one, _) in zip(prompts, tokens, strict=True)])
    apart = np.concatenate([np.abs(own - scores[i][-len(own) :]) for i, (_, own) in enumerate(tokens)])
    assert np.mean(apart) < 0.004
    assert apart.max() < 0.2


class Rounded(_Everywhere):
    """Attention without pages, to keys and values, or latents, of 3 bits of mantissa."""

    def __call__(self, q: Any, k: Any, v: Any, pages: Any, params: Any) -> Any:
        return super().__call__(q, of_three_bits(k), of_three_bits(v), pages, params)

    def latents(self, q: Any, latents: Any, up: Any, pages: Any, scale: float) -> Any:
        return super().latents(q, of_three_bits(latents), up, pages, scale)


def of_three_bits(values: jax.Array) -> jax.Array:
    mantissas, exponents = jnp.frexp(values)
    return jnp.ldexp(jnp.round(mantissas * 16) / 16, exponents)


def check_against_rounded(llm: LLM, prompts: list[list[int]]) -> None:
    """The engine's scores are those of a forward pass without pages whose keys and values are rounded."""
    components = llm.engine._components
    stage, weights = components.plan.decode.stages[0], components.weights.decode[0]

    @jax.jit
    def log_probabilities(weights: Any, token_ids: Any) -> Any:
        model = stage.template.merge(weights)
        hidden, _ = run_slice(model, None, token_ids, None, jnp.arange(len(token_ids)), jnp.zeros(0), Rounded(stage.mesh))
        return jax.nn.log_softmax(model.logits(hidden))

    apart = []
    for prompt, scores in zip(prompts, scored(llm, prompts), strict=True):
        with jax.set_mesh(stage.mesh):
            expected = np.asarray(log_probabilities(weights, np.array(prompt + [0] * (256 - len(prompt)), np.int32)))
        apart.append(np.abs(scores - expected[np.arange(len(prompt) - 1), prompt[1:]]))
    assert np.median(np.concatenate(apart)) < 1e-3
    assert np.mean(np.concatenate(apart)) < 0.02


def test_scores_are_those_of_rounded_keys_and_values_in_a_quarter_of_the_bytes(llms: MakeLLM) -> None:
    exact, small = llms(**SMALL), llms(**FLOAT8)
    check_against_rounded(small, PROMPTS)
    with pytest.raises(AssertionError):
        check_against_rounded(exact, PROMPTS)
    assert small.engine.page_spec.page_bytes * 4 == exact.engine.page_spec.page_bytes
    assert small.engine.stats.kv_tokens > 3.8 * exact.engine.stats.kv_tokens
    assert small.engine.stats.kv_dtype.startswith("float8_e4m3fn, scales found at the start")
    assert exact.engine.stats.kv_dtype == "float32"
    assert fingerprint(small.engine) != fingerprint(exact.engine)


@pytest.mark.parametrize("case", CASES)
def test_every_layout_says_the_same(llms: MakeLLM, case: str) -> None:
    usual, other = llms(**FLOAT8), llms(**FLOAT8 | CASES[case])
    check_alike(other, usual)
    check_alike(other, usual)  # what a cache has by now, in memory or in a tier
    assert other.engine.stats.kv_dtype == usual.engine.stats.kv_dtype
    assert other.engine.stats.num_compilations_after_ready == 0


@pytest.mark.parametrize(("family", "layouts"), [("gemma_3", []), ("deepseek_v3", [{"prefill_parallel": "tp=2"}])])
def test_windows_and_latents(tmp_path: Path, family: str, layouts: list[dict[str, Any]]) -> None:
    """Latents also where two devices have a part of each page."""
    one, *others = (serve(tmp_path, family, kv_dtype="fp8", **layout) for layout in ({}, *layouts))
    prompts = [np.random.default_rng(length).integers(5, 100, length).tolist() for length in (3, 37, 90)]
    check_against_rounded(one, prompts)
    for other in others:
        check_alike(other, one, prompts)


def test_pages_go_to_another_engine(llms: MakeLLM) -> None:
    source = llms(**FLOAT8, kv_peers=True, prefill_chunk_size=64)
    target = llms(**FLOAT8, kv_peers=True, prefill_devices=(1,), decode_devices=(2,), page_size=32)
    pair = Pair(source.engine, target.engine, PageServer("127.0.0.1"), PageClient())
    for number, prompt in enumerate(PROMPTS):
        pair.add_request(str(number), prompt, GREEDY)
    pair.run()
    alone = [tokens for tokens, _ in generated(llms(**FLOAT8))]
    assert sum(pair.tokens[str(number)] == tokens for number, tokens in enumerate(alone)) >= 6  # a value may lie at a border of two codes
    assert target.engine.stats.num_taken_over == 0
    assert fingerprint(source.engine) == fingerprint(target.engine)
    check_all_free(source.engine, target.engine)
    pair.server.close()
    pair.client.close()


def write(folder: Path, change: Any = lambda tensors: tensors) -> Path:
    tiny_model.write(folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def with_values_of(factor: float) -> Any:
    """The same model, whose values are so many times as large on the way."""

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        factors = {"v_proj.weight": factor, "o_proj.weight": 1 / factor}
        return {
            name: tensor * np.float32(next((f for end, f in factors.items() if name.endswith(end)), 1)) for name, tensor in tensors.items()
        }

    return change


@pytest.mark.parametrize("factor", [2.0**12, 2.0**-14])
def test_scales_fit_values_of_any_size(tmp_path: Path, llms: MakeLLM, factor: float) -> None:
    """Without scales of their own the larger ones would all be 448, the smaller 0."""
    llm = LLM(str(write(tmp_path / "model", with_values_of(factor))), **TINY | FLOAT8)
    usual = scored(llms(**FLOAT8), PROMPTS)
    for found, expected in zip(scored(llm, PROMPTS), usual, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-3)
    scales, own = (np.asarray(one.engine._components.weights._pools[0].scales) for one in (llm, llms(**FLOAT8)))
    np.testing.assert_array_equal(scales[:, 1], own[:, 1] * factor)
    np.testing.assert_array_equal(scales[:, 0], own[:, 0])


def test_scales_of_a_checkpoint(tmp_path: Path, llms: MakeLLM) -> None:
    def with_scales(names: tuple[str, str], count: int = 2, kv_heads: int = 1) -> Any:
        def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            scales = {f"model.layers.{i}.self_attn.{name}": np.full(kv_heads, 0.05 + 0.1 * i) for i in range(count) for name in names}
            return tensors | {name: scale.astype(ml_dtypes.bfloat16) for name, scale in scales.items()}

        return change

    for names, kv_heads in ((("k_scale", "v_scale"), 1), (("k_proj.k_scale", "v_proj.v_scale"), 2)):
        folder = write(tmp_path / names[0], with_scales(names, kv_heads=kv_heads))
        llm = LLM(str(folder), **TINY | FLOAT8)
        assert llm.engine.stats.kv_dtype.startswith("float8_e4m3fn, scales the checkpoint's")
        np.testing.assert_array_equal(llm.engine._components.weights._pools[0].scales, np.full((2, 2, 2), [[[0.0625]], [[0.25]]]))
        assert fingerprint(llm.engine) != fingerprint(llms(**FLOAT8).engine)
    LLM(str(folder), **TINY | SMALL)  # which has no use for them
    for number, (names, count, kv_heads, words) in enumerate(
        ((("k_scale", "v_scale"), 1, 1, "layers.1.self_attn.k_scale' and 1 others"), (("k_scale", "v_scale"), 2, 3, r"\(3,\) must be one"))
    ):
        with pytest.raises(CheckpointError, match=words):
            LLM(str(write(tmp_path / str(number), with_scales(names, count, kv_heads))), **TINY | FLOAT8)
    np.testing.assert_array_equal(rounded_up(np.float32([1, 0.5, 0.51, 3, 1e-3])), [1, 0.5, 1, 4, 2**-9])


def test_other_weights_get_other_scales(tmp_path: Path) -> None:
    """In a running engine, which compiles nothing for it; asleep it keeps them."""
    first, second = tiny_model.write(tmp_path / "first"), write(tmp_path / "second", with_values_of(64))
    fresh = LLM(str(second), **TINY | FLOAT8)
    llm = LLM(str(first), **TINY | FLOAT8)
    own, compiled = generated(llm), TOTAL.num_compilations
    llm.update_weights(str(second))
    assert llm.engine.stats.kv_dtype == fresh.engine.stats.kv_dtype
    assert [tokens for tokens, _ in generated(llm)] == [tokens for tokens, _ in generated(fresh)]
    llm.update_weights(str(first))
    llm.sleep(2)
    llm.wake()
    assert [tokens for tokens, _ in generated(llm)] == [tokens for tokens, _ in own]
    assert compiled == TOTAL.num_compilations


def test_what_it_does_not_go_with_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"kv_disk is .*kv_dtype fp8 finds at each start"):
        EngineConfig.of(model="m", kv_dtype="fp8", kv_disk="/tmp/kv:1GiB", kv_host_memory="1GiB")
    with pytest.raises(ConfigError, match="num_processes is 2, and kv_dtype is fp8"):
        EngineConfig.of(model="m", kv_dtype="fp8", num_processes=2, coordinator="localhost:1")
    with pytest.raises(ConfigError, match="kv_dtype is 'int8': it must be one of auto, fp8"):
        EngineConfig.of(model="m", kv_dtype="int8")
