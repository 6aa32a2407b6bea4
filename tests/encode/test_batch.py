"""Rows of texts as arrays: what is where, and that padding is nobody's."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.encode.batch import build_batch, empty_batch, most_texts

ROWS = [[np.array([5, 6, 7], np.int32), np.array([8], np.int32)], [np.array([9, 10], np.int32)]]


@pytest.mark.parametrize(("pooling", "shares"), [("mean", [1 / 3, 1 / 3, 1 / 3, 1, 0, 0]), ("cls", [1, 0, 0, 1, 0, 0])])
def test_texts_lie_one_after_the_other_and_are_numbered_in_order(pooling, shares):
    batch = build_batch(ROWS, 3, 6, pooling)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 0, 0], [9, 10, 0, 0, 0, 0], [0] * 6]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6]
    none = most_texts(3, 6)
    assert batch.texts.tolist() == [[0, 0, 0, 1, none, none], [2, 2, none, none, none, none], [none] * 6]
    np.testing.assert_allclose(batch.shares[0], shares)
    assert batch.shares.sum() == pytest.approx(3)


def test_an_empty_batch_has_no_text():
    batch = empty_batch(2, 8)
    assert (batch.texts == most_texts(2, 8)).all()
    assert not batch.shares.any()
    assert [array.dtype for array in batch] == [np.int32, np.int32, np.int32, np.float32]
