"""Which attention runs: chosen once, with the reason in the log; one that was asked for and can't run is an error."""

import logging

import jax.numpy as jnp
import pytest

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.plan import choose_attention
from tests.engine.test_token_equality import LAYOUTS

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])


@ROLES
def test_auto_takes_the_cpus_kernels_where_they_can_run_and_says_why_not(role, caplog):
    caplog.set_level(logging.INFO, "jaxinfer.plan")
    cases = {
        ("cpu", FLOAT32, 64): ("llvm_cpu", "a kernel made for this processor"),
        ("cpu", BFLOAT16, 64): ("xla", "bfloat16"),
        ("cpu", FLOAT32, 24): ("xla", "24"),
        ("gpu", FLOAT32, 64): ("xla", "not gpu"),
    }
    for (platform, dtype, head_size), (backend, reason) in cases.items():
        caplog.clear()
        assert choose_attention(role, "auto", platform, dtype, head_size) == backend
        assert f"{role} attention backend: {backend}" in caplog.text
        assert reason in caplog.text


@ROLES
def test_what_is_named_runs_or_is_refused(role):
    for name in ("llvm_cpu", "xla", "reference"):
        assert choose_attention(role, name, "cpu", FLOAT32, 64) == name
    for platform, dtype, words in (("gpu", FLOAT32, "CPUs, not gpu"), ("cpu", BFLOAT16, "bfloat16")):
        with pytest.raises(ConfigError, match=f"attention_backend is llvm_cpu, but .*{words}.*: use auto or xla"):
            choose_attention(role, "llvm_cpu", platform, dtype, 64)
    with pytest.raises(ConfigError, match="attention_backend is 'cuda': it must be one of auto, llvm_cpu, xla, reference"):
        EngineConfig.of(attention_backend="cuda")


def test_an_engine_has_what_was_chosen(llm, llms):
    for engine, backend in ((llm.engine, "llvm_cpu"), (llms(**LAYOUTS["XLA alone"]).engine, "xla")):
        plan = engine._parts.plan
        assert (plan.prefill.attention, plan.decode.attention) == (backend, backend)
