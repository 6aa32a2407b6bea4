"""Roofline: the least bytes and operations of a piece of work, and the time that a GPU's rates give for them. Imports
no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RooflineWork:
    """Each input is read once, each output written once; a multiplication and an addition are two operations."""

    num_bytes: float
    num_flops: float

    def __add__(self, other: RooflineWork) -> RooflineWork:
        return RooflineWork(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def times(self, count: int) -> RooflineWork:
        return RooflineWork(self.num_bytes * count, self.num_flops * count)


@dataclass(frozen=True)
class CardRates:
    """A GPU's rates."""

    bytes_per_s: float
    flops_per_s: float  # of dense bfloat16 products

    def floor(self, work: RooflineWork) -> float:
        """Seconds that no implementation of the work is much faster than."""
        return max(work.num_bytes / self.bytes_per_s, work.num_flops / self.flops_per_s)

    def bound(self, work: RooflineWork) -> str:
        """The limiting rate: 'copy' or 'matmul'."""
        return "copy" if work.num_bytes / self.bytes_per_s >= work.num_flops / self.flops_per_s else "matmul"

    def share(self, work: RooflineWork, seconds: float) -> float:
        """The floor over the measured time: 1 is as fast as the GPU can be."""
        return self.floor(work) / seconds


# From the vendor's datasheets of the SXM cards: leads, not measurements. The matrix rates are half of those printed,
# which assume sparsity.
DATASHEET = {"h100": CardRates(3.35e12, 989e12), "h200": CardRates(4.8e12, 989e12)}


def decode_attention(batch: int, context: int, num_heads: int, num_kv_heads: int, head_size: int, itemsize: int) -> RooflineWork:
    """One token a request over contexts of one length, in one layer."""
    queries = batch * num_heads * head_size
    keys_and_values = 2 * batch * context * num_kv_heads * head_size
    return RooflineWork((keys_and_values + 2 * queries) * itemsize, 4 * queries * context)


def prefill_attention(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int, itemsize: int, num_cached: int = 0
) -> RooflineWork:
    """A prompt's new tokens over its cached tokens and themselves, causally, in one layer: the half above the diagonal
    isn't work."""
    num_bytes = 2 * (num_tokens * num_heads + (num_cached + num_tokens) * num_kv_heads) * head_size * itemsize
    return RooflineWork(num_bytes, 4 * num_heads * head_size * num_tokens * (num_cached + (num_tokens + 1) / 2))


def product(rows: int, inputs: int, outputs: int, itemsize: int, num_matrices: int = 1) -> RooflineWork:
    """Rows times a matrix, or each with one of several that are all read."""
    num_bytes = (num_matrices * inputs * outputs + rows * (inputs + outputs)) * itemsize
    return RooflineWork(num_bytes, 2 * rows * inputs * outputs)
