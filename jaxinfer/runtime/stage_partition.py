"""A model cut into the stages of a pipeline, so that none of them takes much longer than another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxinfer.models.base import ModelSlice
from jaxinfer.models.config import ArchitectureConfig
from jaxinfer.runtime.template import ModelTemplate, make_template
from jaxinfer.runtime.work import ModelWork
from sharding.cost_model import LayerWork, Step, part_cost
from sharding.hardware import Hardware
from sharding.layout import Parallel
from sharding.stage_balancer import Costs, balance

# What stages are to take as long as one another for: requests of 1,024 tokens in and 256 out, two at once in prefill and 32 in decode; so many steps
# of each role for 32 of them. The same whatever an engine is set to, so that a cut changes with the model, the layout and the card alone.
STEPS: Mapping[str, tuple[Step, int]] = {"prefill": (Step("prefill", 2, 1024, 1024), 16), "decode": (Step("decode", 32, 1, 1152), 256)}
_SLACK = 0.02  # of the slowest stage's time: what the model of costs can't tell, memory may decide


def cut(template: ModelTemplate, stages: Sequence[range]) -> tuple[ModelTemplate, ...]:
    """A template for the layers of each stage."""
    if len(stages) == 1:
        return (template,)
    assert isinstance(template.config, ArchitectureConfig)
    parts = [ModelSlice(layers, layers.start == 0, layers.stop == template.config.num_layers) for layers in stages]
    return tuple(make_template(template.config, template.form, template.activation_dtype, part) for part in parts)


def stage_layers(work: ModelWork, layout: Parallel, roles: Sequence[str], hardware: Hardware) -> list[range]:
    """The layers of each stage of devices that have these roles, so that the slowest takes as little as it can, as modelled, embedding and head
    included; of cuts within 2% of that the one whose fullest device holds the fewest bytes of weights. Raises `ValueError` for more stages than
    layers."""
    num_layers = len(work.layers)
    if layout.pp == 1:
        return [range(num_layers)]

    def seconds(part: LayerWork) -> float:
        return sum(times * part_cost(part, step, layout.tp, layout.ep, hardware).seconds for step, times in (STEPS[role] for role in roles))

    known = {part: seconds(part) for part in {work.embedding, *work.layers, work.head}}
    costs = Costs([known[layer] for layer in work.layers], known[work.embedding], known[work.head])
    return balance(costs, layout.pp, _stage_bytes(work, layout.tp), _SLACK)


def _stage_bytes(work: ModelWork, num_devices: int) -> Costs:
    """Of weights, on each of a stage's devices."""
    last = len(work.layers) - 1
    layers = [work.layer_bytes(layer, num_devices) for layer in range(last + 1)]
    first, others = work.device_bytes(range(1), num_devices), work.device_bytes(range(last, last + 1), num_devices)
    return Costs(layers, first - layers[0], others - layers[last])
