"""How what experts give comes together, where a mixture's experts are dealt out to devices whole: a cost model of two ways. Imports no JAX.

Tokens are on every device before a mixture, and have to be after it, since attention's all-reduce has left them there: no token is ever
sent to its experts. Each device computes the rows of its own experts and adds up each token's, which is its part of that token's result.

* Replicate: an all-reduce of all parts, zeros included. A ring sends 2 (n - 1) / n of T x D from each device, in one launch.
* All-to-all: each device is home to a share of the tokens. Parts that are there go to their token's home, one a token and device whatever the
  number of its experts there, are added up, and the sums are gathered. Of the first step each device sends (n - 1) / n of its parts, of the second
  (n - 1) / n of T x D: less than the all-reduce by what is not there, but two launches. Even if all tokens go to one device it sends no more
  than an all-reduce does, so the choice can't go far wrong where experts are not chosen evenly, as is supposed here.

A shared expert is split by its columns: it has a part of every token's result on every device. Its parts and the routed ones go by one
all-reduce then, and an all-to-all has nothing to save.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal

from sharding.hardware import hardware_of

Exchange = Literal["replicate", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Link:
    """Between the devices of a mesh."""

    bytes_per_second: float  # that a device sends
    launch_seconds: float  # that a collective takes whatever its size
    is_ragged: bool = True  # whether an all-to-all can send what there is; else it sends what there could be


@dataclass(frozen=True, slots=True)
class Mixture:
    """A step of one layer."""

    num_tokens: int
    size: int  # of a token's vector
    item_bytes: int  # of one of its numbers
    num_experts: int
    top_k: int  # experts of a token
    num_devices: int
    has_shared: bool = False

    @property
    def token_bytes(self) -> int:
        return self.size * self.item_bytes

    @property
    def devices_of_token(self) -> float:
        """How many have a part of a token's result, on average, if all sets of `top_k` experts are as likely."""
        if self.has_shared:
            return self.num_devices
        elsewhere = self.num_experts - self.num_experts // self.num_devices
        return self.num_devices * (1 - comb(elsewhere, self.top_k) / comb(self.num_experts, self.top_k))


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    num_bytes: float  # that each device sends
    num_launches: int

    def seconds(self, link: Link) -> float:
        return self.num_bytes / link.bytes_per_second + self.num_launches * link.launch_seconds


def replicated(mixture: Mixture) -> ExchangeCost:
    """Of an all-reduce of all parts."""
    to_others = (mixture.num_devices - 1) / mixture.num_devices
    return ExchangeCost(2 * to_others * mixture.num_tokens * mixture.token_bytes, 1)


def exchanged(mixture: Mixture, link: Link) -> ExchangeCost:
    """Of an all-to-all of those that are there, and a gather."""
    num_devices, share = mixture.num_devices, -(-mixture.num_tokens // mixture.num_devices)
    of_share = mixture.devices_of_token / num_devices if link.is_ragged else 1  # parts, of its tokens, that a home gets from a device
    return ExchangeCost((num_devices - 1) * share * (of_share + 1) * mixture.token_bytes, 2)


def choose(mixture: Mixture, link: Link) -> tuple[Exchange, str]:
    """The cheaper way, and why."""
    if mixture.has_shared:
        return "replicate", "the shared expert has a part of every token's result on every device"
    ways: dict[Exchange, ExchangeCost] = {"replicate": replicated(mixture), "all_to_all": exchanged(mixture, link)}
    told = ", ".join(
        f"{name} {cost.seconds(link) * 1e6:.1f} us for {cost.num_bytes / 2**20:.2f} MiB a device in {cost.num_launches}"
        for name, cost in ways.items()
    )
    return min(ways, key=lambda name: ways[name].seconds(link)), told


def link_for(device_kind: str) -> Link:
    """Between devices of this kind, as JAX calls it; a GPU that isn't known is taken for an H100. XLA has no ragged all-to-all for CPUs."""
    hardware = hardware_of(device_kind)
    return Link(hardware.link_bandwidth, hardware.link_seconds, is_ragged=not hardware.shares_machine)
