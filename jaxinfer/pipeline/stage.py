"""A stage of a pipeline: some of a model's layers on a mesh of their own, with their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.weights.template import ModelTemplate, Weights
from pallas_kernels.dispatch import KernelBackend
from sharding.hardware import hardware_for
from sharding.partition import move, replicated
from sharding.rules import Rules
from sharding.sequence_parallel import splits_tokens

StagedWeights = tuple[Weights, ...]  # one a stage


@dataclass(frozen=True)
class Stage:
    """What a role's program of one pipeline stage is built from. Without a pipeline there is one stage."""

    template: ModelTemplate
    mesh: Mesh
    rules: Rules
    pool: PagePool
    attention: KernelBackend
    sequence_parallel: str = "off"  # for prefill; see `sharding.sequence_parallel`


def program_name(name: str, stages: Sequence[object], number: int) -> str:
    """A stage's program name, such as 'decode/8 stage 2 of 4'; 'decode/8' if there is only one stage."""
    return name if len(stages) == 1 else f"{name} stage {number + 1} of {len(stages)}"


def abstract_hidden(stage: Stage, num_tokens: int) -> jax.ShapeDtypeStruct | None:
    """Shape of the hidden states that come from the stage before; None for the first stage."""
    template = stage.template
    if template.is_first:
        return None
    return jax.ShapeDtypeStruct((num_tokens, template.config.hidden_size), template.activation_dtype, sharding=replicated(stage.mesh))


def splits_tokens_of(stage: Stage, num_tokens: int) -> bool:
    """Whether the stage's prefill program of this size is sequence-parallel: tokens are split over its devices between
    reductions."""
    template, device = stage.template, stage.mesh.devices.flat[0]
    token_bytes = template.config.hidden_size * template.activation_dtype.itemsize
    return splits_tokens(stage.sequence_parallel, num_tokens, token_bytes, stage.mesh.size, hardware_for(device.device_kind))


def pass_on(array: Array, stage: Stage) -> Array:
    """Copy an array whole to every device of a stage, asynchronously."""
    return move(array, replicated(stage.mesh))
