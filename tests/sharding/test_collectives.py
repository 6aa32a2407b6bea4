"""What the two programs say between devices, counted in the compiled code; and that pages are updated where they lie."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.models.registry import read_config
from jaxinfer.pipeline.stage import Stage
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.programs.compilation import compile_program
from jaxinfer.weights.formats.packed import Packed
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.template import make_template
from sharding.collectives import Collective, collectives, collectives_a_layer
from sharding.mesh import make_mesh
from sharding.rules import TENSOR_PARALLEL
from tests.families import checkpoint
from tests.sharding.branches import exchanges_in_branches
from tests.tiny_model import CONFIG, HIDDEN

RUNNERS = {"prefill": (PrefillRunner, 128), "decode": (DecodeRunner, 8)}
NUM_SAMPLED = {"prefill": 4, "decode": 8}  # rows
TINY = read_config(CONFIG | {"num_key_value_heads": 4, "num_hidden_layers": 2})
FORMATS = {
    "packed": ModelWeightFormat(Packed(jnp.dtype("float32"))),
    "plain": ModelWeightFormat(Plain(jnp.dtype("float32"))),
    "int8": ModelWeightFormat(Packed(jnp.dtype("int8"))),
}


@cache
def compiled(
    config: ArchitectureConfig,
    weight_format: str,
    role: str,
    num_devices: int,
    page_size: int = 16,
    sequence_parallel: str = "off",
    *,
    name: str | None = None,
) -> tuple[jax.stages.Compiled, PagePool]:
    """The role's program, or another of its by name, of abstract weights."""
    if reason := FORMATS[weight_format].matrices.unsupported_reason("cpu"):
        pytest.skip(reason)
    runner, size = RUNNERS[role]
    template, mesh = make_template(config, FORMATS[weight_format]), make_mesh(range(num_devices))
    spec = PageSpec.of(config.with_own_heads(), page_size, 4)
    pool = PagePool(spec, 4096, template.activation_dtype, mesh, TENSOR_PARALLEL, config.heads)
    attention = "llvm_cpu" if weight_format != "plain" else "xla"
    stage = Stage(template, mesh, TENSOR_PARALLEL, pool, attention, sequence_parallel)
    programs = {program.name: program for program in runner([stage], (size,), 256).programs()}
    return compile_program(programs[f"{role}/{name or size}"]), pool


def two_lengths(config: ArchitectureConfig, num_layers: int, *how: Any) -> tuple[str, str]:
    """The program of the model's first so many layers, and that of one more."""
    shortened = (replace(config, num_layers=num, spans=config.spans[:num]) for num in (num_layers, num_layers + 1))
    shorter, longer = (compiled(of_layers, *how)[0].as_text() for of_layers in shortened)
    return shorter, longer


def reduced(*shape: int) -> Collective:
    return Collective("all-reduce", (f"f32[{','.join(map(str, shape))}]",))


def gathered(dtype: str, *shape: int) -> Collective:
    return Collective("all-gather", (f"{dtype}[{','.join(map(str, shape))}]",))


@pytest.mark.parametrize("role", RUNNERS)
def test_copies_of_heads_and_heads_of_zeros_say_nothing_more(role):
    config = read_config(CONFIG | {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2}).on_devices(8)
    assert config.heads is not None
    shorter, longer = two_lengths(config, 1, "plain", role, 8)
    assert collectives_a_layer(shorter, longer) == {reduced(RUNNERS[role][1], HIDDEN): 2}


@pytest.mark.parametrize("role", RUNNERS)
@pytest.mark.parametrize(("weight_format", "num_devices"), [("packed", 2), ("plain", 4), ("int8", 2)])
def test_devices_add_up_once_an_attention_and_once_an_mlp(weight_format, num_devices, role):
    shorter, longer = two_lengths(TINY, 1, weight_format, role, num_devices)
    summed = reduced(RUNNERS[role][1], HIDDEN)
    assert collectives_a_layer(shorter, longer) == {summed: 2}
    assert collectives(shorter) == {summed: 2 + 1}, "one more is the embedding's rows"


@pytest.mark.parametrize("role", RUNNERS)
@pytest.mark.parametrize(("weight_format", "num_devices"), [("packed", 2), ("plain", 4), ("int8", 2)])
def test_devices_exchange_candidates_and_never_scores(weight_format, num_devices, role):
    rows = NUM_SAMPLED[role]

    def of(name: str) -> Counter[Collective]:
        return collectives(compiled(TINY, weight_format, role, num_devices, name=name)[0].as_text())

    best = gathered("s32", num_devices, 2, rows)  # each part's best score and its token
    assert of(f"greedy/{rows}") == {best: 1}
    assert of(f"sample/{rows}") == {
        best: 1,
        reduced(rows, 1): 1,  # the best score of all
        gathered("f32", num_devices, rows, 15): 2,  # sums above so many thresholds at once, in the loops of top-k and top-p
        gathered("f32", num_devices, rows): 2,  # all weights' sums: for top-p, and of the parts to draw from
        gathered("s32", num_devices, rows): 1,  # each part's token, of which one was drawn
        gathered("s32", num_devices, rows, 42): 1,  # log-probabilities: sums, and the 20 best of each part
    }
    if role == "prefill":
        assert of("score/128") == {gathered("s32", num_devices, 32, 42): 1}


@pytest.mark.parametrize("role", RUNNERS)
def test_no_exchange_is_in_a_branch(role):
    """A GPU's host would wait at it until all before it has run."""
    rows = NUM_SAMPLED[role]
    for name in (None, f"greedy/{rows}", f"sample/{rows}"):
        assert not exchanges_in_branches(compiled(TINY, "plain", role, 2, name=name)[0].as_text()), name


def test_exchanges_in_branches_are_seen():
    branch = "%region_1 (a: f32[4]) -> f32[4] {\n  ROOT %b = f32[4]{0} fusion(%a), kind=kLoop, calls=%inner\n}\n"
    inner = "%inner (a: f32[4]) -> f32[4] {\n  ROOT %all-reduce.1 = f32[4]{0} all-reduce(%a), channel_id=1\n}\n"
    entry = "ENTRY %main (p: f32[4]) -> f32[4] {\n  ROOT %c = f32[4]{0} conditional(%q, %p), branch_computations={%region_1}\n}\n"
    assert exchanges_in_branches(inner + branch + entry) == {"inner"}
    assert not exchanges_in_branches(inner + branch + entry.replace("conditional", "call"))


@pytest.mark.parametrize(("weight_format", "num_devices"), [("packed", 2), ("plain", 4), ("int8", 2)])
def test_tokens_that_are_split_are_gathered_before_products_and_sums_scattered(weight_format, num_devices):
    shorter, longer = two_lengths(TINY, 1, weight_format, "prefill", num_devices, 16, "on")
    whole, share = gathered("f32", 128, HIDDEN), Collective("reduce-scatter", (f"f32[{128 // num_devices},{HIDDEN}]",))
    assert collectives_a_layer(shorter, longer) == {share: 2, whole: 2}
    without = compiled(replace(TINY, num_layers=1, spans=TINY.spans[:1]), weight_format, "prefill", num_devices)[0].as_text()
    more = collectives(shorter) - collectives(without)
    assert more == {share: 2, whole: 2 + 1}, "the last layer's tokens are gathered once more; sampling's exchanges are as they were"


# One of a kind that has something to it between or beside the two sums: norms, latents, experts of which one is every token's. Latents are whole on
# four devices, in pages of 16.
KINDS = {"qwen3": 1, "gemma_3": 1, "deepseek_v3": 2, "llama_4": 1, "qwen3_moe": 1}


@pytest.mark.parametrize(("role", "family"), [*(("decode", family) for family in KINDS), ("prefill", "deepseek_v3")])
def test_every_kind_of_layer_costs_two_sums(role, family):
    config = read_config(checkpoint.config_of(family))
    shorter, longer = two_lengths(config, KINDS[family], "plain", role, 4 if family == "deepseek_v3" else 2)
    assert collectives_a_layer(shorter, longer) == {reduced(RUNNERS[role][1], config.hidden_size): 2}


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gemma_3", "llama_4"))])
def test_every_kind_of_layer_with_split_tokens_gathers_and_scatters_twice(family):
    config = read_config(checkpoint.config_of(family))
    shorter, longer = two_lengths(config, KINDS[family], "plain", "prefill", 2, 16, "on")
    found = Counter(one.kind for one in collectives_a_layer(shorter, longer).elements())
    assert found == {"reduce-scatter": 2, "all-gather": 2}


@pytest.mark.parametrize("role", RUNNERS)
def test_latents_that_are_shared_out_cost_two_exchanges_more_in_decode_and_one_in_prefill(role):
    config = read_config(checkpoint.config_of("deepseek_v3"))
    assert config.latent is not None
    num_rows, heads, rank, width = RUNNERS[role][1], config.num_heads, config.latent.rank, config.latent.latent_size
    shorter, longer = two_lengths(config, 2, "plain", role, 2, 32)
    added = collectives_a_layer(shorter, longer)
    assert added.pop(reduced(num_rows, config.hidden_size)) == 2
    # Queries, then each head's outputs and the logarithm of its sum; or some of the context's latents, in a loop over them.
    to_each = f"u32[1,{num_rows},{heads // 2},{rank + 1}]"
    queries = {gathered("f32", num_rows, heads, width): 1, Collective("all-to-all", (to_each, to_each)): 1}
    of_prompts = gathered("f32", 2, 4 * 256 // 32, 16 * width)  # all of four rows' pages: eight runs of 128 tokens
    assert added == ({of_prompts: 1} if role == "prefill" else queries)


def test_norms_over_all_heads_cost_a_number_a_token_more():
    config = read_config(checkpoint.config_of("olmo2"))
    shorter, longer = two_lengths(config, 1, "plain", "decode", 2)
    of_norms = Collective("all-reduce", ("f32[8]", "f32[8]"))  # of queries and keys, at once
    assert collectives_a_layer(shorter, longer) == {reduced(8, config.hidden_size): 2, of_norms: 1}


@pytest.mark.parametrize("role", RUNNERS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_one_device_says_nothing_and_copies_no_pages(weight_format, role):
    program, pool = compiled(TINY, weight_format, role, 1)
    assert not collectives(program.as_text())
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.device_bytes
    assert memory.temp_size_in_bytes < pool.device_bytes / 8


def test_collectives_are_read_from_text():
    program = """
  %all-reduce.1 = f32[8,64]{1,0} all-reduce(%dot.3), channel_id=1, replica_groups={{0,1}}
  ROOT %both = (bf16[4]{0}, bf16[2,3]{1,0}) all-reduce(%a, %b), channel_id=2
  %start = bf16[32,8192]{1,0} all-reduce-start(%gemm_fusion_dot.3), channel_id=3
  %done = bf16[32,8192]{1,0} all-reduce-done(%start)
  %sum-start = ((bf16[2048,8192]{1,0}), bf16[2048,8192]{1,0}) all-reduce-start(%gemm_fusion_dot.6), channel_id=4
  %sum-done = bf16[2048,8192]{1,0} all-reduce-done(%sum-start)
  %gather-start = (s32[1,2]{1,0}, s32[8,2]{1,0}) all-gather-start(%bitcast), channel_id=4
  %gather-done = s32[8,2]{1,0} all-gather-done(%gather-start)
  %gathers = ((f32[1]{0}, pred[2]{0}), (f32[4]{0}, /*index=1*/pred[8]{0})) all-gather-start(%a, %b), dimensions={0}
  %permute-start = (f8e4m3fn[16]{0}, f8e4m3fn[16]{0}, u32[], u32[]) collective-permute-start(%c)
  %all-to-all = (s4[3]{0}, s4[3]{0}) all-to-all(%d, %e)
  %fusion = f32[8]{0} fusion(%all-reduce.1), kind=kLoop, calls=%all-reduce
"""
    found = collectives(program)
    assert {str(collective): collective.num_bytes for collective in found} == {
        "all-reduce f32[8,64]": 2048,
        "all-reduce bf16[4], bf16[2,3]": 20,
        "all-reduce bf16[32,8192]": 2**19,
        "all-reduce bf16[2048,8192]": 2**25,
        "all-gather s32[8,2]": 64,
        "all-gather f32[4], pred[8]": 24,
        "collective-permute f8e4m3fn[16]": 16,
        "all-to-all s4[3], s4[3]": 4,
    }
    assert set(found.values()) == {1}
    with pytest.raises(ValueError, match="lacks all-reduce f32"):
        collectives_a_layer(program, program.replace("f32[8,64]", "f32[8,65]"))
