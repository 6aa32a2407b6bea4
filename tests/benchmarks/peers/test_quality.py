from __future__ import annotations

import numpy as np
import pytest

from benchmarks.peers.quality import compare_distributions, windows


def test_perplexity_is_of_each_token_given_those_before_it_in_its_window() -> None:
    # Over three tokens: 0 follows with 1/2, then 1 with 1/4. A window's first token and what follows its last don't count.
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.9, 0.05, 0.05]])).astype(np.float32)
    assert compare_distributions(logits, [[2, 0, 1]]).perplexity == pytest.approx(8**0.5)
    both = np.concatenate([logits, logits])
    assert compare_distributions(both, [[2, 0, 1], [2, 0, 1]]).perplexity == pytest.approx(8**0.5)


def test_divergence_is_from_the_reference_to_the_other() -> None:
    reference, other = np.log(np.array([[0.5, 0.5], [0.9, 0.1]])), np.log(np.array([[0.75, 0.25], [0.9, 0.1]]))
    found = compare_distributions(other + 7.0, [[0, 1]], reference)  # a constant more changes no distribution
    expected = 0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)
    assert found.divergence == pytest.approx(expected / 2)
    assert found.divergence != pytest.approx((0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)) / 2)


def test_agreement_counts_the_best_tokens() -> None:
    reference = np.eye(200, 5, dtype=np.float32)
    other = reference.copy()
    other[:50] = other[:50, ::-1]  # wherever it was not the middle one
    same = sum(i >= 5 or i == 2 for i in range(50)) + 150
    assert compare_distributions(other, [list(range(5)) * 40], reference).agreement == pytest.approx(same / 200)
    alike = compare_distributions(reference, [list(range(5)) * 40], reference)
    assert (alike.divergence, alike.agreement) == (0.0, 1.0)


def test_only_whole_windows_are_read() -> None:
    assert windows(range(10), 4, 5) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(range(10), 4, 1) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="the text has 3 tokens"):
        windows(range(3), 4, 1)


def test_logits_of_another_text_are_not_taken() -> None:
    with pytest.raises(AssertionError, match="2 rows of logits for 3 tokens"):
        compare_distributions(np.zeros((2, 4), np.float32), [[1, 2, 3]])
