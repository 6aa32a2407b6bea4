"""Which mesh axis each logical axis of a weight or a cache lies on: a table for each role, data rather than code.

Weights name their axes (`embed`, `heads`, `mlp`, ...); a model never names a mesh axis. What a table does not name is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping

from sharding.mesh import TENSOR

Rules = Mapping[str, str]

# Megatron's split (arXiv:1909.08053): columns of the first matrix, rows of the second, one all-reduce after each pair. Of a mixture's
# `experts` every device has its columns of each: all have as much to do whichever a step's tokens go to. Latents belong to no head: of pages of
# them it is tokens that are shared out.
TENSOR_PARALLEL: Rules = {"heads": TENSOR, "kv_heads": TENSOR, "page_tokens": TENSOR, "mlp": TENSOR, "expert_mlp": TENSOR, "vocab": TENSOR}

# The same but for experts, which are dealt out whole: matrices of fewer devices are read from end to end, and tiles of packed ones need not
# divide; but a step is as slow as the device that most of its tokens go to.
EXPERT_PARALLEL: Rules = {"heads": TENSOR, "kv_heads": TENSOR, "page_tokens": TENSOR, "mlp": TENSOR, "experts": TENSOR, "vocab": TENSOR}

# An encoder has no scores over its vocabulary, which seldom divides: its table lies whole on every device.
ENCODER: Rules = {"heads": TENSOR, "kv_heads": TENSOR, "mlp": TENSOR}

RULES: Mapping[str, Rules] = {"prefill": TENSOR_PARALLEL, "decode": TENSOR_PARALLEL, "encode": ENCODER}


def rules_for(role: str, ep: int = 1) -> Rules:
    """A role's table; `ep`: devices that experts are dealt out to, 1 where each has its columns of every expert."""
    return EXPERT_PARALLEL if ep > 1 else RULES[role]
