"""Both ways of the benchmark do the same work, and a model's bytes are counted as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compression
from checkpoints.hub import open_source
from pallas_kernels.lossless_matmul.op import unsupported_reason


@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_a_models_bytes_and_products(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = compression.real_weights(open_source(tiny_model_path))
    assert 0.755 * plain < packed < 0.82 * plain  # headers weigh more in small matrices, vectors are as they were
    monkeypatch.setattr(compression, "LAYERS", 1)
    monkeypatch.setattr(compression, "MATRICES", ((64, 32),))
    found = compression.products(compression.stacks(), 3, 2)
    assert len(found) == 2
    assert all(seconds > 0 for pair in found for seconds in pair)


def test_who_goes_first_changes() -> None:
    order = []
    found = compression.in_turns(lambda: order.append("plain") or 2.0, lambda: order.append("lossless") or 1.0, 2)  # type: ignore[func-returns-value]
    assert order == ["plain", "lossless", "lossless", "plain"]
    assert found == [(2.0, 1.0), (2.0, 1.0)]
    assert compression.row(found) == ("2000.00", "1000.00", "2.00 (2.00-2.00)")
