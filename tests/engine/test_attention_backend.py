"""Which attention runs: chosen once, with the reason in the log; one that was asked for and can't run is an error."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.models.registry import read_config
from jaxinfer.planner.backends import choose_attention
from tests.engine.test_token_equality import LAYOUTS

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
HOPPER = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
AMPERE = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
BLACKWELL = SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0")
SMALL = SimpleNamespace(platform="gpu", device_kind="NVIDIA GeForce RTX 5090", compute_capability="12.0")
UNKNOWN = SimpleNamespace(platform="gpu", device_kind="a GPU that says nothing of itself")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5")


def choose(role, name, device, dtype, head_size, page_size=16, buckets=(32, 512)):
    return choose_attention(role, name, device, dtype, PageSpec(2, 2, head_size, page_size, dtype.itemsize), buckets)


@ROLES
def test_auto_takes_the_devices_kernels_where_they_can_run_and_logs_the_reason_where_not(role, caplog):
    caplog.set_level(logging.INFO, "jaxinfer.planner.backends")
    for device, dtype, head_size, backend, reason in (
        (CPU, FLOAT32, 64, "llvm_cpu", "the best for cpu"),
        (CPU, BFLOAT16, 64, "xla", "bfloat16"),
        (CPU, FLOAT32, 24, "xla", "24"),
        (HOPPER, BFLOAT16, 128, "mosaic_gpu", "the best for NVIDIA H200"),
        (HOPPER, FLOAT32, 64, "xla", "float32"),
        (HOPPER, BFLOAT16, 24, "xla", "24"),
        (AMPERE, BFLOAT16, 128, "xla", "compute capability 9.0 and newer, not 8.0"),
        (BLACKWELL, BFLOAT16, 256, "mosaic_gpu", "the best for NVIDIA B200"),
        (SMALL, BFLOAT16, 128, "mosaic_gpu", "the best for NVIDIA GeForce RTX 5090"),
        (SMALL, BFLOAT16, 256, "xla", "heads of 256 on a card with 101376 bytes of shared memory"),
        (TPU, BFLOAT16, 128, "xla", "the best for TPU v5"),
        (UNKNOWN, BFLOAT16, 128, "xla", "compute capability 9.0 and newer, not None"),
    ):
        caplog.clear()
        assert choose(role, "auto", device, dtype, head_size) == backend
        assert f"{role} attention backend: {backend}" in caplog.text
        assert reason in caplog.text


@pytest.mark.parametrize(("page_size", "num_devices", "part_size"), [(128, 8, 16), (64, 8, 8), (16, 8, 16), (16, 1, 16), (128, 1, 128)])
def test_devices_that_share_latents_out_attend_to_their_part(page_size, num_devices, part_size):
    config = read_config(model_shape("kimi-k2.5")).on_devices(num_devices)
    of_device = PageSpec.of(config, page_size, 2).on_device(num_devices, config.num_kv_heads, 61)
    assert of_device.part_size == part_size
    for role in ("decode", "prefill"):
        assert choose_attention(role, "auto", HOPPER, BFLOAT16, of_device, (512,), latent=config.latent) == "mosaic_gpu"


def test_latents_that_prefill_has_no_kernel_for(caplog):
    caplog.set_level(logging.INFO, "jaxinfer.planner.backends")
    config = read_config(model_shape("kimi-k2.5"))
    pages = PageSpec.of(config, 16, 2)
    odd = replace(config.latent, rope_size=8)
    assert choose_attention("prefill", "auto", HOPPER, BFLOAT16, pages, (512,), latent=odd) == "xla"
    assert "latents' keys of 128 and 8 columns" in caplog.text
    assert choose_attention("prefill", "auto", CPU, FLOAT32, pages, (512,), latent=config.latent) == "xla"
    assert choose_attention("prefill", "auto", SMALL, BFLOAT16, pages, (512,), latent=config.latent) == "mosaic_gpu"


@ROLES
def test_what_is_named_runs_or_is_refused(role):
    for name in ("llvm_cpu", "xla", "reference"):
        assert choose(role, name, CPU, FLOAT32, 64) == name
    for name in ("mosaic_gpu", "xla", "reference"):
        assert choose(role, name, HOPPER, BFLOAT16, 64) == name
    for name, device, dtype, words in (
        ("llvm_cpu", HOPPER, FLOAT32, "CPUs, not gpu"),
        ("llvm_cpu", CPU, BFLOAT16, "bfloat16"),
        ("mosaic_gpu", CPU, BFLOAT16, "NVIDIA GPUs, not cpu"),
        ("mosaic_gpu", AMPERE, BFLOAT16, "compute capability 9.0 and newer, not 8.0"),
        ("mosaic_gpu", HOPPER, FLOAT32, "float32"),
    ):
        with pytest.raises(ConfigError, match=f"attention_backend is {name}, but .*{words}.*: use auto or xla"):
            choose(role, name, device, dtype, 64)
    with pytest.raises(ConfigError, match="attention_backend is 'cuda': it must be one of auto, mosaic_gpu, llvm_cpu, xla, reference"):
        EngineConfig.of(attention_backend="cuda")


def test_prefill_buckets_of_tiles_that_no_kernel_has_are_xlas(caplog):
    caplog.set_level(logging.INFO, "jaxinfer.planner.backends")
    assert choose("prefill", "auto", HOPPER, BFLOAT16, 64, buckets=(32, 20)) == "xla"
    assert "tiles of 4 query tokens" in caplog.text
    assert choose("decode", "auto", HOPPER, BFLOAT16, 64, buckets=(32, 20)) == "mosaic_gpu"
    assert choose("prefill", "auto", HOPPER, BFLOAT16, 64, buckets=(32, 24)) == "mosaic_gpu"


def test_an_engine_has_what_was_chosen(llm, llms):
    for engine, backend in ((llm.engine, "llvm_cpu"), (llms(**LAYOUTS["XLA alone"]).engine, "xla")):
        plan = engine._components.plan
        assert (plan.prefill.attention, plan.decode.attention) == (backend, backend)
