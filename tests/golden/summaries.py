"""What is kept of scores, as files of arrays hold them."""

from __future__ import annotations

import numpy as np


def summary(prefix: str, scores: np.ndarray, vocab_ids: np.ndarray, num_best: int) -> dict[str, np.ndarray]:
    """What is kept of scores [N, V]."""
    best = np.argsort(-scores, axis=-1, kind="stable")[:, :num_best].astype(np.int32)
    wide = scores.astype(np.float64)
    top = wide.max(-1)
    return {
        f"{prefix}logits": scores[:, vocab_ids],
        f"{prefix}best_ids": best,
        f"{prefix}best_logits": np.take_along_axis(scores, best, -1),
        f"{prefix}logsumexp": (np.log(np.exp(wide - top[:, None]).sum(-1)) + top).astype(np.float32),
    }
