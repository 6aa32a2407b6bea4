"""A plan's activations are those of compiled programs."""

from __future__ import annotations

import pytest

from jaxinfer.dry_run import Target, dry_run
from jaxinfer.models.shapes import model_shape

pytestmark = pytest.mark.aot


def test_activations_are_compiled_and_grow_with_the_batch():
    small, large = (dry_run(model_shape("smollm2-135m"), Target.of("1xh100"), batch=batch, chunk_size=256) for batch in (1, 128))
    assert small.is_compiled
    assert small.as_json()["compiled"]
    assert 0 < small.activation_bytes < large.activation_bytes < 2**30
    assert small.kv_bytes - large.kv_bytes == large.activation_bytes - small.activation_bytes
