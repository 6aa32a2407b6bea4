"""Expert-parallel combine: a cost model of two ways to combine expert outputs, where each device has whole experts.
Imports no JAX.

Tokens are on every device before a mixture-of-experts layer, because attention's all-reduce has left them there, and
must be on every device after it. So no token is ever sent to its experts. Each device computes the rows of its own
experts and adds up each token's, which is its part of that token's result.

* Replicate: an all-reduce of all parts, zeros included. A ring sends 2 (n - 1) / n of T x D from each device, in one
  launch.
* All-to-all: each device is home to a share of the tokens. A device sends its nonzero parts to the token's home, one a
  token and device whatever the number of its experts there. They are added up there, and the sums are gathered. In the
  first step each device sends (n - 1) / n of its parts, in the second (n - 1) / n of T x D. That is less than the
  all-reduce by the missing parts, but two launches. Even if all tokens go to one device it sends no more than an
  all-reduce, so the choice can't go far wrong where experts are not chosen evenly, as is assumed here.

A shared expert is split by its columns: it has a part of every token's result on every device. Its parts and the routed
ones share one all-reduce then, and an all-to-all saves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal

from sharding.hardware import hardware_for

Exchange = Literal["replicate", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Link:
    """The link between the devices of a mesh."""

    bytes_per_second: float  # sent by a device
    launch_seconds: float  # of a collective, whatever its size
    is_ragged: bool = True  # whether an all-to-all can send only nonzero parts; otherwise it sends all possible ones


@dataclass(frozen=True, slots=True)
class MoELayerWork:
    """The work of a step in one mixture-of-experts layer."""

    num_tokens: int
    size: int  # of a token's vector
    item_bytes: int  # of one of its elements
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
    num_bytes: float  # sent by each device
    num_launches: int

    def seconds(self, link: Link) -> float:
        return self.num_bytes / link.bytes_per_second + self.num_launches * link.launch_seconds


def replicated_cost(mixture: MoELayerWork) -> ExchangeCost:
    """The cost of an all-reduce of all parts."""
    to_others = (mixture.num_devices - 1) / mixture.num_devices
    return ExchangeCost(2 * to_others * mixture.num_tokens * mixture.token_bytes, 1)


def exchange_cost(mixture: MoELayerWork, link: Link) -> ExchangeCost:
    """The cost of an all-to-all of the nonzero parts, and a gather."""
    num_devices, share = mixture.num_devices, -(-mixture.num_tokens // mixture.num_devices)
    # parts of its tokens that a home gets from a device
    of_share = mixture.devices_of_token / num_devices if link.is_ragged else 1
    return ExchangeCost((num_devices - 1) * share * (of_share + 1) * mixture.token_bytes, 2)


def choose(mixture: MoELayerWork, link: Link) -> tuple[Exchange, str]:
    """The cheaper way, and the reason."""
    if mixture.has_shared:
        return "replicate", "the shared expert has a part of every token's result on every device"
    ways: dict[Exchange, ExchangeCost] = {"replicate": replicated_cost(mixture), "all_to_all": exchange_cost(mixture, link)}
    told = ", ".join(
        f"{name} {cost.seconds(link) * 1e6:.1f} us for {cost.num_bytes / 2**20:.2f} MiB a device in {cost.num_launches}"
        for name, cost in ways.items()
    )
    return min(ways, key=lambda name: ways[name].seconds(link)), told


def link_for(device_kind: str) -> Link:
    """The link between devices of this kind, by JAX's name; an unknown GPU counts as an H100. XLA has no ragged
    all-to-all for CPUs."""
    hardware = hardware_for(device_kind)
    return Link(hardware.link_bandwidth, hardware.link_seconds, is_ragged=not hardware.shares_machine)
