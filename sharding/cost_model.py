"""Estimates of a step's time and what it is spent on: bytes read, products, and collectives. Imports no JAX.

A roofline (Williams et al., CACM 2009) for each part of a model. Its matrices are read while they are multiplied, so
that the slower of both counts, and the same for attention over keys and values. Collectives and kernel launches are
added. It shows which layout is faster and why, to some tens of percent; `sharding.hardware` has what a GPU really
reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from operator import add
from typing import Literal

from sharding.expert_exchange import Link, MoELayerWork, choose, exchange_cost
from sharding.hardware import HARDWARE, Hardware
from sharding.sequence_parallel import splits_tokens


@dataclass(frozen=True)
class Matrices:
    """Matrices that tokens are multiplied with, or whose rows are looked up."""

    split_bytes: int = 0  # split over tp devices
    whole_bytes: int = 0  # on each device
    split_values: int = 0  # a multiplication and an addition each, for each token
    whole_values: int = 0
    row_bytes: int = 0  # of a table in which each token looks up a row
    dtype: str = "bfloat16"  # the type of the product


@dataclass(frozen=True)
class ExpertWork:
    """The experts of a mixture-of-experts layer, a few of which each token uses; all are alike."""

    num_experts: int
    top_k: int
    expert_bytes: int  # of all matrices of one expert
    expert_values: int
    dtype: str = "bfloat16"
    has_shared: bool = False  # whether every token uses one more, split over devices like other matrices

    def num_hit(self, num_tokens: int) -> float:
        """The expected number of different experts that `num_tokens` tokens use, if each is as likely as any other."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


_GATHERED_TOKENS = 4096  # tokens whose latents prefill gathers at once


@dataclass(frozen=True)
class AttentionWork:
    """Attention over the keys and values of one layer."""

    token_bytes: int  # cached for a token, on all devices together where heads are split over them
    is_split: bool  # otherwise each device reads everything cached for a token
    decode_values: int  # multiplied for a query and a key, of all heads
    prefill_values: int
    # for latents: multiplied for each key in prefill, to expand it; in decode for each query, to project it to latents
    expand_values: int = 0
    # for latents that are split over devices: of a query, what decode sends for all heads, both ways
    exchanged_bytes: int = 0
    window: int | None = None  # most tokens that a query attends to
    chunk: int | None = None  # the same, counted from the start of the query's own chunk

    def num_pairs(self, first: int, stop: int) -> float:
        """Keys attended to by all queries from one position on, up to another."""
        return self._pairs_before(stop) - self._pairs_before(first)

    def num_read(self, first: int, stop: int) -> int:
        """Different keys among them."""
        if self.window is not None:
            return stop - max(first - (self.window - 1), 0)
        return stop - (first // self.chunk * self.chunk if self.chunk is not None else 0)

    def num_keys(self, context: int) -> float:
        """Keys that the last token of a context attends to; in a chunk the average over its positions."""
        size = self.chunk if self.chunk is not None and context > self.chunk else 1
        return self.num_pairs(context - size, context) / size

    def _pairs_before(self, stop: int) -> int:
        def triangle(n: int) -> int:
            return n * (n + 1) // 2

        if self.window is not None:
            return triangle(min(stop, self.window)) + max(stop - self.window, 0) * self.window
        if self.chunk is not None:
            return stop // self.chunk * triangle(self.chunk) + triangle(stop % self.chunk)
        return triangle(stop)


@dataclass(frozen=True)
class LayerWork:
    """The work of a step in one layer, in the embedding or in the head."""

    matrices: Matrices = Matrices()
    experts: ExpertWork | None = None
    attention: AttentionWork | None = None
    reduced_bytes: tuple[int, ...] = ()  # of a token, in each all-reduce over tp devices
    # bytes of a token's activations that are read and written between products, split over tp devices
    split_moved: int = 0
    whole_moved: int = 0  # the same that each device does itself
    num_kernels: int = 0
    of_sampled: bool = False  # only the last token of each sequence reaches it


@dataclass(frozen=True)
class Step:
    """The shape of one call of a program."""

    role: Literal["prefill", "decode"]
    num_sequences: int
    num_queries: int  # query tokens of each sequence; 1 in decode
    context: int  # tokens of each sequence at the end of the step

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_queries


_BOUNDS = {
    "weight_reads": "reading weights",
    "products": "products with weights",
    "kv_reads": "reading KV",
    "attention": "attention's products",
    "collectives": "collectives",
    "starts": "starting kernels",
    "activations": "moving activations",
}


@dataclass(frozen=True)
class StepCost:
    """Seconds. Where reads and products overlap they add up to more than `seconds`."""

    seconds: float = 0.0
    weight_reads: float = 0.0
    products: float = 0.0
    kv_reads: float = 0.0
    attention: float = 0.0
    collectives: float = 0.0
    starts: float = 0.0
    activations: float = 0.0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __mul__(self, count: int) -> StepCost:
        return StepCost(*(getattr(self, each.name) * count for each in fields(self)))

    @property
    def bound(self) -> str:
        """The largest part of the time."""
        return _BOUNDS[max(_BOUNDS, key=lambda name: getattr(self, name))]


def part_cost(part: LayerWork, step: Step, tp: int, ep: int, hardware: Hardware) -> StepCost:
    """The cost of one part of a model in one step, split over `tp` devices, or with whole experts on `ep` of them."""
    weight_bytes, products = _matrices(part, step, tp, hardware)
    if part.experts is not None:
        expert_bytes, expert_products = _experts(part.experts, step.num_tokens, tp, ep, hardware)
        weight_bytes, products = weight_bytes + expert_bytes, products + expert_products
    kv_bytes, pairs = _attention(part.attention, step, tp) if part.attention is not None else (0.0, 0.0)
    rate = hardware.rate("bfloat16") * hardware.attention_share
    weight_reads, kv_reads, attention = weight_bytes / hardware.bandwidth, kv_bytes / hardware.bandwidth, 2 * pairs / rate
    collectives = _collectives(part, step, tp, ep, hardware)
    collectives += exchange_seconds(part.attention, step, tp, hardware) if part.attention is not None else 0.0
    starts = part.num_kernels * hardware.kernel_seconds
    whole_moved = float(part.whole_moved)
    if _splits_tokens(part, step, tp, hardware):
        whole_moved /= tp
        collectives += len(part.reduced_bytes) * hardware.link_seconds
    activations = _rows(part, step) * (part.split_moved / tp + whole_moved) / hardware.activation_bandwidth
    both = max if hardware.overlaps else add
    of_weights = max if part.matrices.dtype in hardware.product_rates else both
    seconds = of_weights(weight_reads, products) + both(kv_reads, attention) + collectives + starts + activations
    return StepCost(seconds, weight_reads, products, kv_reads, attention, collectives, starts, activations)


def all_reduce_seconds(num_bytes: float, num_devices: int, hardware: Hardware) -> float:
    """Each device's sum of all devices' bytes, by a ring: 2 (n - 1) / n of them pass each link (Patarasuk and Yuan,
    2009)."""
    if num_devices == 1:
        return 0.0
    return hardware.link_seconds + 2 * (num_devices - 1) / num_devices * num_bytes / hardware.link_bandwidth


def exchange_seconds(attention: AttentionWork, step: Step, tp: int, hardware: Hardware) -> float:
    """The communication of attention to latents that are split over devices: in decode queries to all and results back,
    in prefill the context's latents, some thousands at a time."""
    if tp == 1 or not attention.exchanged_bytes:
        return 0.0
    num_bytes, starts = step.num_tokens * attention.exchanged_bytes, 2
    if step.role == "prefill":
        num_read = step.num_sequences * attention.num_read(step.context - step.num_queries, step.context)
        num_bytes, starts = num_read * attention.token_bytes, -(-num_read // _GATHERED_TOKENS)
    return starts * hardware.link_seconds + (tp - 1) / tp * num_bytes / hardware.link_bandwidth


def move_seconds(num_bytes: float, hardware: Hardware) -> float:
    """From one device to another."""
    return hardware.link_seconds + num_bytes / hardware.link_bandwidth


def expected_max(mean: float, deviation: float, num_devices: int) -> float:
    """About the expected maximum over `num_devices` devices of independent amounts with this mean and deviation."""
    return mean + deviation * math.sqrt(2 * math.log(num_devices))


def _collectives(part: LayerWork, step: Step, tp: int, ep: int, hardware: Hardware) -> float:
    """All-reduces; the results of whole experts may be combined by an all-to-all instead, where that is faster."""
    seconds = [all_reduce_seconds(_rows(part, step) * size, tp, hardware) for size in part.reduced_bytes]
    if part.experts is not None and ep > 1 and seconds:
        experts, link = part.experts, Link(hardware.link_bandwidth, hardware.link_seconds, is_ragged=not hardware.shares_machine)
        mixture = MoELayerWork(step.num_tokens, part.reduced_bytes[-1], 1, experts.num_experts, experts.top_k, ep, experts.has_shared)
        if choose(mixture, link)[0] == "all_to_all":
            seconds[-1] = exchange_cost(mixture, link).seconds(link)
    return sum(seconds)


def _splits_tokens(part: LayerWork, step: Step, tp: int, hardware: Hardware) -> bool:
    """Whether between a layer's sums each device has its share of the tokens. Programs decide it by data sheets,
    calibrated or not. Where the time of activations isn't counted, neither is what this saves of it."""
    if step.role != "prefill" or part.attention is None or not part.reduced_bytes or math.isinf(hardware.activation_bandwidth):
        return False
    return splits_tokens("auto", step.num_tokens, part.reduced_bytes[0], tp, HARDWARE.get(hardware.name, hardware))


def _rows(part: LayerWork, step: Step) -> int:
    return step.num_sequences if part.of_sampled else step.num_tokens


def _matrices(part: LayerWork, step: Step, tp: int, hardware: Hardware) -> tuple[float, float]:
    """Bytes that a device reads, and seconds of its products."""
    matrices, num_rows = part.matrices, _rows(part, step)
    values = matrices.split_values / tp + matrices.whole_values
    num_bytes = matrices.split_bytes / tp + matrices.whole_bytes + num_rows * matrices.row_bytes
    return num_bytes, 2 * num_rows * values / hardware.product_rate(matrices.dtype, num_rows)


def _experts(experts: ExpertWork, num_tokens: int, tp: int, ep: int, hardware: Hardware) -> tuple[float, float]:
    """The same for experts: those that the tokens use. Where whole experts are on their devices, for the device with
    the most work."""
    hit, rows = experts.num_hit(num_tokens), float(num_tokens * experts.top_k)
    if ep > 1:
        share = hit / experts.num_experts
        of_device = experts.num_experts / ep
        hit = min(expected_max(hit / ep, math.sqrt(of_device * share * (1 - share)), ep), of_device)
        rows = min(expected_max(rows / ep, math.sqrt(rows / ep), ep), rows)
        return hit * experts.expert_bytes, 2 * rows * experts.expert_values / hardware.rate(experts.dtype)
    return hit * experts.expert_bytes / tp, 2 * rows * experts.expert_values / tp / hardware.rate(experts.dtype)


def _attention(attention: AttentionWork, step: Step, tp: int) -> tuple[float, float]:
    """Bytes of keys and values that a device reads, and values that it multiplies."""
    if step.num_queries == 1:
        read = num_pairs = attention.num_keys(step.context)
    else:
        queries = step.context - step.num_queries, step.context
        read, num_pairs = attention.num_read(*queries), attention.num_pairs(*queries)
    if step.role == "decode":
        values = num_pairs * attention.decode_values + step.num_queries * attention.expand_values
    else:
        values = num_pairs * attention.prefill_values + read * attention.expand_values
    read_bytes = read * attention.token_bytes / (tp if attention.is_split else 1)
    return step.num_sequences * read_bytes, step.num_sequences * values / tp
