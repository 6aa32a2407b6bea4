"""How long a model's steps take in a layout, and what requests that come to: predicted, by `sharding.cost_model`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from operator import add

from jaxinfer.dry_run.shapes import RoleShape
from jaxinfer.dry_run.workload import Kind, Workload
from jaxinfer.runtime.buckets import prefill_rows
from sharding.cost_model import Step, StepCost, move_seconds, part_cost
from sharding.hardware import Hardware
from sharding.pipeline import round_seconds, steady_bubble_share, timeline

_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Steps:
    """One role's steps, one for each stage and micro-batch, once the pipeline is full. Seconds."""

    costs: tuple[StepCost, ...]  # of each stage with one micro-batch
    num_micro_batches: int
    move_seconds: float  # from one stage to the next
    return_seconds: float  # from the last to the first, which waits for it

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each stage."""
        return tuple(cost.seconds for cost in self.costs)

    @property
    def round_seconds(self) -> float:
        """Until every micro-batch has been through all stages once."""
        return round_seconds(self.seconds, self.num_micro_batches, move_seconds=self.move_seconds, return_seconds=self.return_seconds)

    @property
    def bubble_share(self) -> float:
        return steady_bubble_share(self.seconds, self.num_micro_batches, move_seconds=self.move_seconds, return_seconds=self.return_seconds)

    @property
    def bound(self) -> str:
        """What the slowest stage spends most on."""
        return max(self.costs, key=lambda cost: cost.seconds).bound


@dataclass(frozen=True)
class Speed:
    """What a workload comes to, all devices busy."""

    batch: int  # sequences that decode at once
    requests_per_second: float
    output_tokens_per_second: float
    first_token_seconds: float  # of a prompt of mean length that nothing waits before
    token_seconds: float  # between a sequence's tokens, other prompts' prefill on the same devices included
    prefill_share: float  # of the time that prefill's devices have work
    decode_share: float
    handoff_seconds: float  # of a mean prompt's pages, from mesh to mesh


def stage_costs(shape: RoleShape, step: Step, hardware: Hardware) -> tuple[StepCost, ...]:
    """Of each stage's program in a step."""
    layout, call = shape.layout, StepCost(hardware.step_seconds, starts=hardware.step_seconds)

    def of_stage(layers: range) -> StepCost:
        counted = Counter(shape.work.of_stage(layers))
        costs = (part_cost(part, step, layout.tp, layout.ep, hardware) * count for part, count in counted.items())
        return reduce(add, costs, call)

    return tuple(of_stage(stage.layers) for stage in shape.stages)


def decode_steps(shape: RoleShape, batch: int, context: int, hardware: Hardware) -> Steps:
    """Of `batch` sequences, cut into as many micro-batches as there are stages."""
    lanes = shape.layout.pp
    rows = math.ceil(batch / lanes)
    costs = stage_costs(shape, Step("decode", rows, 1, max(context, 1)), hardware)
    if lanes == 1:
        return Steps(costs, 1, 0.0, 0.0)
    return Steps(costs, lanes, move_seconds(rows * _hidden_bytes(shape), hardware), move_seconds(rows * _TOKEN_BYTES, hardware))


def prefill_steps(shape: RoleShape, num_sequences: int, num_tokens: int, context: int, hardware: Hardware) -> Steps:
    """Of chunks of so many tokens of each of some sequences, as many chunks under way as there are stages."""
    costs = stage_costs(shape, Step("prefill", num_sequences, num_tokens, max(context, num_tokens)), hardware)
    if len(costs) == 1:
        return Steps(costs, 1, 0.0, 0.0)
    return Steps(costs, len(costs), move_seconds(num_sequences * num_tokens * _hidden_bytes(shape), hardware), 0.0)


def speed(
    prefill: RoleShape, decode: RoleShape, workload: Workload, batch: int, chunk_size: int, hardware: Hardware, *, is_shared: bool
) -> Speed:
    """`is_shared`: both roles are the same devices, which take turns; else the slower of the two sets the pace."""
    prompts = [_prompt(prefill, kind, chunk_size, hardware) for kind in workload.kinds]
    busy = sum(kind.share * prompt[0] for kind, prompt in zip(workload.kinds, prompts, strict=True))
    step = decode_steps(decode, batch, workload.decode_context, hardware).round_seconds
    decoding = workload.mean_output * step / batch  # of all devices' time, for one request
    rate = 1 / (busy + decoding) if is_shared else min(1 / busy, 1 / decoding)
    first = sum(kind.share * prompt[1] for kind, prompt in zip(workload.kinds, prompts, strict=True))
    handoff = 0.0
    if not is_shared:
        config = decode.architecture.with_own_heads()
        of_token = sum(part.attention.token_bytes for part in prefill.work.layers if part.attention)
        of_token = of_token * config.num_kv_heads // prefill.architecture.num_kv_heads if config.latent is None else of_token
        links = min(prefill.layout.num_devices, decode.layout.num_devices)
        handoff = move_seconds(workload.mean_input * of_token / links, hardware)
    return Speed(
        batch,
        rate,
        rate * workload.mean_output,
        first,
        step + (batch * busy / workload.mean_output if is_shared else 0.0),
        min(rate * busy, 1.0),
        min(rate * decoding, 1.0),
        handoff,
    )


def _prompt(shape: RoleShape, kind: Kind, chunk_size: int, hardware: Hardware) -> tuple[float, float]:
    """Of one prompt: how long the slowest stage is at work on it, and how long it takes to its first token, alone."""
    length = kind.input_length
    if length < chunk_size:  # several prompts go into one step
        together = min(prefill_rows(chunk_size), chunk_size // length)
        busy = max(prefill_steps(shape, together, length, length, hardware).seconds) / together
        alone = prefill_steps(shape, 1, length, length, hardware)
        return busy, timeline(alone.seconds, 1, move_seconds=alone.move_seconds).seconds
    sizes = [chunk_size] * (length // chunk_size) + [length % chunk_size] * (length % chunk_size > 0)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    steps = [prefill_steps(shape, 1, size, end, hardware) for size, end in zip(sizes, ends, strict=True)]
    by_stage = [sum(step.seconds[stage] for step in steps) for stage in range(len(steps[0].seconds))]
    mean = [seconds / len(steps) for seconds in by_stage]
    return max(by_stage), timeline(mean, len(steps), move_seconds=steps[0].move_seconds).seconds


def most_sequences(num_pages: int, pages_each: int, most: int) -> int:
    """The largest power of two of sequences that so many pages hold, up to `most`; 0 if not one."""
    fitting = min(num_pages // pages_each, most)
    return 2 ** int(math.log2(fitting)) if fitting >= 1 else 0


def _hidden_bytes(shape: RoleShape) -> int:
    """Of a token on its way between stages."""
    return shape.architecture.hidden_size * shape.template.activation_dtype.itemsize
