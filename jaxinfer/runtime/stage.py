"""A stage of a pipeline: some of a model's layers on a mesh of their own, with their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.runtime.template import ModelTemplate, Weights
from pallas_kernels.dispatch import Backend
from sharding.hardware import hardware_of
from sharding.partition import move, replicated
from sharding.rules import Rules
from sharding.sequence_parallel import splits_tokens

StagedWeights = tuple[Weights, ...]  # of each stage


@dataclass(frozen=True)
class Stage:
    """What a role's program of it is made of. A model that is not cut has one, with all of it."""

    template: ModelTemplate
    mesh: Mesh
    rules: Rules
    pool: PagePool
    attention: Backend
    sequence_parallel: str = "off"  # of prefill; see `sharding.sequence_parallel`


def program_name(name: str, stages: Sequence[object], number: int) -> str:
    """What is of one of these stages: such as 'decode/8', where there is but one, or 'decode/8 stage 2 of 4'."""
    return name if len(stages) == 1 else f"{name} stage {number + 1} of {len(stages)}"


def abstract_hidden(stage: Stage, num_tokens: int) -> jax.ShapeDtypeStruct | None:
    """What comes in from the stage before; None where tokens do."""
    template = stage.template
    if template.is_first:
        return None
    return jax.ShapeDtypeStruct((num_tokens, template.config.hidden_size), template.activation_dtype, sharding=replicated(stage.mesh))


def splits_tokens_of(stage: Stage, num_tokens: int) -> bool:
    """Whether the stage's prefill program of so many tokens has them split over its devices between sums."""
    template, device = stage.template, stage.mesh.devices.flat[0]
    token_bytes = template.config.hidden_size * template.activation_dtype.itemsize
    return splits_tokens(stage.sequence_parallel, num_tokens, token_bytes, stage.mesh.size, hardware_of(device.device_kind))


def pass_on(array: Array, stage: Stage) -> Array:
    """Whole onto every device of a stage. Nothing waits for it here."""
    return move(array, replicated(stage.mesh))
