"""The mesh axis of each logical axis of a weight or a cache: a table for each role, data rather than code.

Weights name their axes (`embed`, `heads`, `mlp`, ...); a model never names a mesh axis. Axes that a table does not name
are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping

from sharding.mesh import TENSOR

Rules = Mapping[str, str]

# Megatron's split (arXiv:1909.08053): columns of the first matrix, rows of the second, one all-reduce after each pair.
# For mixture-of-experts layers every device has its columns of each of the `experts`: all have equal work wherever a
# step's tokens go. Latents belong to no head: their pages are split by tokens.
TENSOR_PARALLEL: Rules = {"heads": TENSOR, "kv_heads": TENSOR, "page_tokens": TENSOR, "mlp": TENSOR, "expert_mlp": TENSOR, "vocab": TENSOR}

# The same but with whole experts on devices. Matrices of fewer experts are read from end to end, and tiles of packed
# ones need not divide; but a step is as slow as the device that most of its tokens go to.
EXPERT_PARALLEL: Rules = {"heads": TENSOR, "kv_heads": TENSOR, "page_tokens": TENSOR, "mlp": TENSOR, "experts": TENSOR, "vocab": TENSOR}

# An encoder computes no scores over its vocabulary, whose size seldom divides: its table is whole on every device.
ENCODER: Rules = {"heads": TENSOR, "kv_heads": TENSOR, "mlp": TENSOR}

RULES: Mapping[str, Rules] = {"prefill": TENSOR_PARALLEL, "decode": TENSOR_PARALLEL, "encode": ENCODER}


def rules_for(role: str, ep: int = 1) -> Rules:
    """A role's table. `ep`: devices over which whole experts are distributed, 1 where each has its columns of every
    expert."""
    return EXPERT_PARALLEL if ep > 1 else RULES[role]
