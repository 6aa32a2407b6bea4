"""Step times of a model in a layout, and the throughput and latency that they give: predicted by
`sharding.cost_model`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from operator import add

from jaxinfer.planner.placement import RolePlacement
from jaxinfer.planner.workload import RequestClass, Workload
from jaxinfer.programs.buckets import prefill_rows
from sharding.cost_model import Step, StepCost, move_seconds, part_cost
from sharding.hardware import Hardware
from sharding.pipeline import round_seconds, steady_bubble_share, timeline

_TOKEN_BYTES = 4


@dataclass(frozen=True)
class StepTimes:
    """One role's step on each stage, once the pipeline is full. Times in seconds."""

    costs: tuple[StepCost, ...]  # one a stage, with one micro-batch
    num_micro_batches: int
    move_seconds: float  # from one stage to the next
    return_seconds: float  # from the last stage to the first, which waits for the token

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each stage."""
        return tuple(cost.seconds for cost in self.costs)

    @property
    def round_seconds(self) -> float:
        """Time in which every micro-batch passes all stages once."""
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
    """Throughput and latency of a workload with all devices busy."""

    batch: int  # sequences that decode at once
    requests_per_second: float
    output_tokens_per_second: float
    first_token_seconds: float  # of a prompt of mean length, without queueing
    token_seconds: float  # between a sequence's tokens; includes other prompts' prefill on the same devices
    prefill_share: float  # of time in which prefill's devices are busy
    decode_share: float
    handoff_seconds: float  # to move a mean prompt's pages between meshes


def stage_costs(shape: RolePlacement, step: Step, hardware: Hardware) -> tuple[StepCost, ...]:
    """The cost of a step on each stage."""
    layout, call = shape.layout, StepCost(hardware.step_seconds, starts=hardware.step_seconds)

    def of_stage(layers: range) -> StepCost:
        counted = Counter(shape.work.of_stage(layers))
        costs = (part_cost(part, step, layout.tp, layout.ep, hardware) * count for part, count in counted.items())
        return reduce(add, costs, call)

    return tuple(of_stage(stage.layers) for stage in shape.stages)


def decode_steps(shape: RolePlacement, batch: int, context: int, hardware: Hardware) -> StepTimes:
    """Decode steps of `batch` sequences, split into one micro-batch a stage."""
    micro_batches = shape.layout.pp
    rows = math.ceil(batch / micro_batches)
    costs = stage_costs(shape, Step("decode", rows, 1, max(context, 1)), hardware)
    if micro_batches == 1:
        return StepTimes(costs, 1, 0.0, 0.0)
    return StepTimes(costs, micro_batches, move_seconds(rows * _hidden_bytes(shape), hardware), move_seconds(rows * _TOKEN_BYTES, hardware))


def prefill_steps(shape: RolePlacement, num_sequences: int, num_tokens: int, context: int, hardware: Hardware) -> StepTimes:
    """Prefill steps with `num_tokens` of each of `num_sequences`; as many chunks are in flight as there are stages."""
    costs = stage_costs(shape, Step("prefill", num_sequences, num_tokens, max(context, num_tokens)), hardware)
    if len(costs) == 1:
        return StepTimes(costs, 1, 0.0, 0.0)
    return StepTimes(costs, len(costs), move_seconds(num_sequences * num_tokens * _hidden_bytes(shape), hardware), 0.0)


def speed(
    prefill: RolePlacement, decode: RolePlacement, workload: Workload, batch: int, chunk_size: int, hardware: Hardware, *, is_shared: bool
) -> Speed:
    """`is_shared`: both roles alternate on the same devices; otherwise the slower one limits the rate."""
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


def _prompt(shape: RolePlacement, kind: RequestClass, chunk_size: int, hardware: Hardware) -> tuple[float, float]:
    """(seconds of the slowest stage's work on one prompt, seconds to its first token when nothing else runs)."""
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
    """The largest power of two of sequences whose pages fit, up to `most`; 0 if not even one fits."""
    fitting = min(num_pages // pages_each, most)
    return 2 ** int(math.log2(fitting)) if fitting >= 1 else 0


def _hidden_bytes(shape: RolePlacement) -> int:
    """Bytes of a token's hidden state, which one stage sends to the next."""
    return shape.architecture.hidden_size * shape.template.activation_dtype.itemsize
