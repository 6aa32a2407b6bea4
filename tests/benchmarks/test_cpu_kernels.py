"""Both ways of each piece of work do the same work."""

import jax
import numpy as np
import pytest

from benchmarks.cpu_kernels import Pair, decode_attention, measure, prefill_attention, products


@pytest.mark.parametrize(
    "make",
    [
        lambda: products("float32", 3, layers=2),
        lambda: decode_attention(2, 32, layers=2),
        lambda: prefill_attention(64, 32, layers=2),
    ],
    ids=["products", "decode", "prefill"],
)
def test_both_ways_give_the_same(make):
    pair = make()
    np.testing.assert_allclose(pair.kernel(), pair.xla(), atol=2e-5)


def test_a_round_is_a_measurement_of_each(monkeypatch):
    calls = []
    monkeypatch.setattr(jax, "block_until_ready", lambda value: value)
    found = measure(Pair("", lambda: calls.append("kernel"), lambda: calls.append("xla")), 2)
    assert calls == ["kernel", "xla"] + ["kernel"] * 5 + ["xla"] * 10 + ["kernel"] * 5
    assert len(found) == 2
