"""Partition of a model into pipeline stages of about equal time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxinfer.architecture.model_config import ArchitectureConfig
from jaxinfer.models.base import ModelSlice
from jaxinfer.planner.model_work import ModelWork
from jaxinfer.weights.template import ModelTemplate, make_template
from sharding.cost_model import LayerWork, Step, part_cost
from sharding.hardware import Hardware
from sharding.layout import Parallel
from sharding.stage_balancer import LayerCosts, balance

# Stages are balanced for requests of 1,024 tokens in and 256 out, two at once in prefill and 32 in decode: how many
# steps each role takes for 32 requests. Fixed, so that a partition depends on model, layout and card only.
STEPS: Mapping[str, tuple[Step, int]] = {"prefill": (Step("prefill", 2, 1024, 1024), 16), "decode": (Step("decode", 32, 1, 1152), 256)}
_SLACK = 0.02  # of the slowest stage's time: differences below the cost model's accuracy, where memory decides


def cut(template: ModelTemplate, stages: Sequence[range]) -> tuple[ModelTemplate, ...]:
    """A template for the layers of each stage."""
    if len(stages) == 1:
        return (template,)
    assert isinstance(template.config, ArchitectureConfig)
    parts = [ModelSlice(layers, layers.start == 0, layers.stop == template.config.num_layers) for layers in stages]
    return tuple(make_template(template.config, template.weight_format, template.activation_dtype, part) for part in parts)


def stage_layers(work: ModelWork, layout: Parallel, roles: Sequence[str], hardware: Hardware) -> list[range]:
    """The layers of each stage on devices with these roles. The slowest stage is as fast as possible by the cost model,
    embedding and head included. Among partitions within 2% of that, it is the one whose fullest device has the fewest
    bytes of weights. Raises `ValueError` for more stages than layers."""
    num_layers = len(work.layers)
    if layout.pp == 1:
        return [range(num_layers)]

    def seconds(part: LayerWork) -> float:
        return sum(times * part_cost(part, step, layout.tp, layout.ep, hardware).seconds for step, times in (STEPS[role] for role in roles))

    known = {part: seconds(part) for part in {work.embedding, *work.layers, work.head}}
    costs = LayerCosts([known[layer] for layer in work.layers], known[work.embedding], known[work.head])
    return balance(costs, layout.pp, _stage_bytes(work, layout.tp), _SLACK)


def _stage_bytes(work: ModelWork, num_devices: int) -> LayerCosts:
    """Bytes of weights on each device of a stage."""
    last = len(work.layers) - 1
    layers = [work.weights.of_layer(layer, num_devices) for layer in range(last + 1)]
    first, others = work.weights.on_device(range(1), num_devices), work.weights.on_device(range(last, last + 1), num_devices)
    return LayerCosts(layers, first - layers[0], others - layers[last])
