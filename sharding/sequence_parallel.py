"""Whether prefill's residuals are split over a stage's devices by their tokens: a cost model. Imports no JAX.

With all-reduces every device has all tokens between two sums, and adds and normalises them all. With sequence
parallelism (arXiv:2205.05198) a sum is scattered, each device adds and normalises its share of the tokens, and the
result is gathered before the next product. By a ring both send the same bytes: 2 (n - 1) / n of T x D from each device.
It saves (n - 1) / n of the work between sums, and costs a launch more for each of them.

Where the link between devices adds up what they send (NVLink's switch), an all-reduce sends about T x D, the other two
together twice that: more than there is to save. Virtual devices of one machine send nothing: an all-reduce adds up
arrays in memory, the other two copy them once more.
"""

from __future__ import annotations

from sharding.hardware import Hardware

# reads and writes of a token's vector between two sums: an addition reads two and writes one, a norm reads one and
# writes one
MOVES = 5
# The savings must exceed this many launches, because a virtual device's collectives wait for devices without a core.
# With it the model agrees with prefill of SmolLM2, which was never faster on two devices, and on four and eight from
# some 400 tokens on.
_LAUNCHES = 3


def is_cheaper(num_bytes: float, num_devices: int, hardware: Hardware) -> bool:
    """Whether it is cheaper than an all-reduce of `num_bytes` bytes."""
    if num_devices == 1 or hardware.adds_in_link:
        return False
    saved = (num_devices - 1) / num_devices * MOVES * num_bytes / min(hardware.activation_bandwidth, hardware.bandwidth)
    copied = num_bytes / num_devices / hardware.link_bandwidth if hardware.shares_machine else 0.0
    return saved > copied + _LAUNCHES * hardware.link_seconds


def splits_tokens(mode: str, num_tokens: int, token_bytes: int, num_devices: int, hardware: Hardware) -> bool:
    """Whether to split tokens, by `mode`: 'auto', 'on' or 'off'; in a program of `num_tokens` tokens, with vectors of
    `token_bytes` bytes, on devices that all work. Tokens that the devices do not divide are not split."""
    if mode == "off" or num_devices == 1 or num_tokens % num_devices:
        return False
    return mode == "on" or is_cheaper(num_tokens * token_bytes, num_devices, hardware.shared_by(num_devices))
