"""A device holds no weight that no program reads: every leaf of every family reaches what the decode program gives."""

from __future__ import annotations

import jax
import pytest
from jax.interpreters import partial_eval

from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.planner.target import Target
from jaxinfer.planner.target_model import TargetModel
from jaxinfer.planner.target_programs import role_stages
from jaxinfer.programs.compilation import ProgramSource
from sharding.layout import Parallel
from tests.families import checkpoint
from tests.golden.family_logits.read import FOLDER

FAMILIES = sorted(folder.parent.name for folder in FOLDER.glob("*/config.json"))


def unread_arguments(source: ProgramSource) -> list[int]:
    """Which of the first argument's arrays nothing in the program's outputs follows from."""
    with jax.set_mesh(source.mesh):
        traced = jax.make_jaxpr(source.function)(*source.arguments)
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return [number for number, _ in enumerate(source.arguments[0]) if not used[number]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_on_a_device_is_read(family: str) -> None:
    target = Target.of("cpu")
    placed = TargetModel(checkpoint.config_of(family), target).place_shared(Parallel()).decode
    stages = role_stages(placed, target, 0, 8, 64)
    (step,) = (source for source in DecodeRunner(stages, (8,), 64).programs() if source.name == "decode/8")
    assert [stages[0].template.leaves[number].name for number in unread_arguments(step)] == []


def test_what_a_program_does_not_read_is_found() -> None:
    arrays = tuple(jax.ShapeDtypeStruct((2,), "float32") for _ in range(3))
    mesh = jax.make_mesh((1,), ("tensor",))
    assert unread_arguments(ProgramSource("one", lambda weights: weights[0] + weights[2], (arrays,), mesh)) == [1]
