"""Which type `--dtype auto` means on which processor."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.weights import format_choice
from jaxinfer.weights.format_choice import choose_formats, compute_type
from pallas_kernels.llvm.host import host_target


@pytest.mark.parametrize(
    ("extensions", "dtype", "reason"),
    [
        ({}, "float32", "no bfloat16 products"),
        ({"avx512_bf16": True}, "bfloat16", "AVX512-BF16 multiplies it"),
        ({"amx_bf16": True}, "bfloat16", "AMX multiplies it"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_multiplies_it(
    extensions: dict[str, bool], dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(host_target(), **{"avx512_bf16": False, "amx_bf16": False} | extensions)
    monkeypatch.setattr(format_choice, "host_target", lambda: machine)
    name, why = compute_type(ModelConfig(dtype="auto"), "cpu")
    assert name == dtype
    assert reason in why
    matrices, activations = choose_formats(ModelConfig(), "cpu")
    assert (matrices.dtype, activations) == (jnp.dtype(dtype), jnp.float32)


def test_a_type_that_is_asked_for_is_taken_anywhere() -> None:
    assert compute_type(ModelConfig(dtype="float32"), "gpu") == ("float32", "asked for")
    assert compute_type(ModelConfig(dtype="bfloat16"), "cpu") == ("bfloat16", "asked for")
    assert compute_type(ModelConfig(dtype="auto"), "gpu")[0] == "bfloat16"
