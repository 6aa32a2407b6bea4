"""Loads of experts: how evenly tokens are routed. Programs count them on the devices; the host reads on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from jaxinfer.models.base import CausalLM
from jaxinfer.pipeline.stage import Stage
from jaxinfer.stats import ExpertLoad
from sharding.partition import place, replicated

_MOST = 2**30  # when an expert's count reaches it, a stage's counts are halved, so later tokens weigh twice as much


class ExpertLoads:
    """Token counts of a role's experts. No step donates them, so any thread may read them at any time."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.abstract = tuple(map(_abstract_counts, stages))  # one a stage; None: it has no experts
        self.counts: list[Array | None] = [None for _ in stages]
        first = stages[0]
        self._num_devices = first.mesh.size if "experts" in first.rules else 1

    def reset(self) -> None:
        """Restart the counts at 0."""
        self.counts = [None if a is None else place(np.zeros(a.shape, a.dtype), a.sharding) for a in self.abstract]

    def read(self) -> ExpertLoad | None:
        """None if there are no experts, and before the first step."""
        found = [np.asarray(counts, np.int64) for counts in self.counts if counts is not None]
        return expert_load(np.concatenate(found), self._num_devices) if found else None


def expert_load(counts: Int[np.ndarray, "L E"], num_devices: int) -> ExpertLoad | None:
    """Balance of experts and devices, with experts divided over `num_devices`; None if no token was counted."""
    if not counts.sum():
        return None
    of_devices = counts.reshape(len(counts), num_devices, -1).sum(2)
    experts, devices = (n.max(1) / n.mean(1) for n in (counts, of_devices))
    return ExpertLoad(float(experts.mean()), float(experts.max()), float(devices.mean()) if num_devices > 1 else None)


def with_loads(counts: Int[Array, "L E"] | None, model: CausalLM, is_token: Bool[Array, " T"]) -> Int[Array, "L E"] | None:
    """The counts plus what the model's routers chose for rows that are tokens, in the order of layers."""
    if counts is None:
        return None
    chosen: list[tuple[Any, Any]] = sorted(nnx.to_flat_state(nnx.pop(model, nnx.Intermediate)), key=lambda item: item[0])
    assert len(chosen) == len(counts), (chosen, counts.shape)
    takes = is_token[:, None, None]
    of_layers = [((experts[...][:, :, None] == jnp.arange(counts.shape[1])) & takes).sum((0, 1), dtype=jnp.int32) for _, experts in chosen]
    total = counts + jnp.stack(of_layers)
    return jnp.where(total.max() < _MOST, total, total // 2)


def _abstract_counts(stage: Stage) -> jax.ShapeDtypeStruct | None:
    routers = [leaf for leaf in stage.template.leaves if leaf.paths[0].startswith("blocks.") and leaf.paths[0].endswith(".router.kernel")]
    if not routers:
        return None
    return jax.ShapeDtypeStruct((len(routers), routers[0].shape[-1]), jnp.int32, sharding=replicated(stage.mesh))
