"""What a device can do: bandwidths, rates and latencies, with the source of each figure. Imports no JAX.

Sources. H100 SXM5: "NVIDIA H100 Tensor Core GPU" data sheet (3.35 TB/s; dense, half of what it prints with sparsity:
989 TFLOP/s bfloat16, 1,979 fp8 and int8, 495 TF32, in which XLA multiplies float32; NVLink 900 GB/s both ways; PCIe 5
128 GB/s both ways). H200: "NVIDIA H200 Tensor Core GPU" data sheet (4.8 TB/s, otherwise the same). B200: "NVIDIA
Blackwell" data sheet, of HGX (7.7 TB/s; dense: 2,250 TFLOP/s bfloat16, 4,500 fp8 and int8, 1,100 TF32; NVLink 1.8 TB/s
both ways). RTX PRO 6000: "NVIDIA RTX Blackwell PRO GPU Architecture" (1.79 TB/s; dense: 504 TFLOP/s bfloat16, 1,008 fp8
and int8, 252 TF32; no NVLink). Reached rates are not published: the shares below are what large copies, products and
NCCL's all-reduces commonly show on such cards. None has been measured by this project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Hardware:
    """One device as a program sees it: rates are reached ones, in bytes, or multiplications and additions, a second."""

    name: str
    bandwidth: float  # of its memory
    matmul_rates: Mapping[str, float] = field(hash=False)  # of a large product, by the type of its factors
    link_bandwidth: float  # to the other devices of the machine, one way
    link_seconds: float  # of the smallest collective or transfer
    host_bandwidth: float  # to the host's memory, one way
    kernel_seconds: float  # of the smallest kernel
    step_seconds: float  # fixed time of a step: the host's call, its arguments and its results
    attention_share: float  # attention's products as a share of the matmul rate
    overlaps: bool = True  # whether a matrix is read while the one before it is multiplied
    # For products whose matrices are read meanwhile, by type and number of rows; other types have the rates above.
    product_rates: Mapping[str, Mapping[int, float]] = field(default_factory=dict, hash=False)
    activation_bandwidth: float = math.inf  # of activations between products: norms, residuals, gates
    shares_machine: bool = False  # whether the rates are all devices' together, as for a CPU split into virtual devices
    # whether the link adds up what devices send, so that an all-reduce sends half as much as a ring
    adds_in_link: bool = False
    # of a shared machine, where known: one core's work is done on as many devices at a time
    num_cores: int | None = None
    is_measured: bool = False

    def rate(self, dtype: str) -> float:
        """The rate of products with weights of this type; for an unknown type, the slowest."""
        return self.matmul_rates.get(dtype, min(self.matmul_rates.values()))

    def product_rate(self, dtype: str, num_rows: float) -> float:
        """The rate of a product of `rows` rows. Between measured sizes a product's time is interpolated linearly."""
        rates = self.product_rates.get(dtype)
        if not rates or num_rows <= 0:
            return self.rate(dtype)
        sizes = sorted(rates)
        if num_rows >= sizes[-1]:
            return rates[sizes[-1]]
        more = next(size for size in sizes if size >= num_rows)
        less = max((size for size in sizes if size <= num_rows), default=more)
        if more == less:
            return rates[more]
        share = (num_rows - less) / (more - less)
        return num_rows / ((1 - share) * less / rates[less] + share * more / rates[more])

    def shared_by(self, num_devices: int) -> Hardware:
        """One of `num_devices` devices that work at the same time."""
        if not self.shares_machine or num_devices == 1:
            return self
        rates = {dtype: rate / num_devices for dtype, rate in self.matmul_rates.items()}
        by_rows = {dtype: {rows: rate / num_devices for rows, rate in of.items()} for dtype, of in self.product_rates.items()}
        shared = {name: getattr(self, name) / num_devices for name in _BANDWIDTHS}
        in_turn = max(1.0, num_devices / self.num_cores) if self.num_cores else 1.0
        shared |= {name: getattr(self, name) * in_turn for name in ("kernel_seconds", "step_seconds")}
        # measured with two: each further device waits for a core
        shared["link_seconds"] = self.link_seconds * num_devices / 2
        return Hardware(**{**self._fields(), **shared, "matmul_rates": rates, "product_rates": by_rows})

    def _fields(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def write(self, path: Path) -> None:
        """As JSON, for `read`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Hardware:
        """Reads what `write` wrote. Raises `ValueError` for anything else, `OSError` where there is no such file."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            found["product_rates"] = {name: {int(rows): r for rows, r in of.items()} for name, of in found.get("product_rates", {}).items()}
            made = cls(**found)
            numbers = [*made.matmul_rates.values(), *(value for value in found.values() if isinstance(value, (int, float)))]
            numbers += [rate for of_type in made.product_rates.values() for rate in of_type.values()]
            if not made.matmul_rates or not all(isinstance(number, (int, float)) and number >= 0 for number in numbers):
                raise ValueError("a rate is no number of at least 0")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no calibration: {error}; delete it, or write it anew with jaxinfer plan --calibrate") from error
        return made


_BANDWIDTHS = ("bandwidth", "link_bandwidth", "host_bandwidth", "activation_bandwidth")
# reached shares: of bandwidth by a copy, of the dense rate by a product, of NVLink by a collective
_COPY, _MATMUL, _LINK = 0.9, 0.75, 0.8

_PCIE = 64e9 * 0.8


def _gpu(
    name: str, bandwidth: float, bfloat16: float, float32: float, int8: float, *, nvlink: float | None = None, kernel_share: float = 1.0
) -> Hardware:
    """From its data sheet. `kernel_share`: the share of the dense rate that the instructions of this project's kernels
    have."""
    # Packed experts are dequantised to bfloat16 in the kernel, and multiplied in it.
    packed = bfloat16 * kernel_share
    sheet = {"bfloat16": bfloat16, "float16": bfloat16, "float32": float32, "fp8": packed, "int8": int8, "int4": packed}
    return Hardware(
        name,
        bandwidth=bandwidth * _COPY,
        matmul_rates={dtype: rate * _MATMUL for dtype, rate in sheet.items()},
        link_bandwidth=nvlink * _LINK if nvlink else _PCIE,
        link_seconds=10e-6,  # NCCL's time for a few bytes on eight cards
        host_bandwidth=_PCIE,
        kernel_seconds=2e-6,  # as part of a CUDA graph
        step_seconds=100e-6,
        attention_share=0.6 * kernel_share,  # the target of this project's kernels
        adds_in_link=nvlink is not None,  # NVLink's switch (NVLS)
    )


# A CPU of a few cores, unless it has been calibrated: two with AVX-512 and the bandwidth of one memory channel.
_CPU = Hardware(
    "cpu",
    bandwidth=25e9,
    matmul_rates={"bfloat16": 250e9, "float32": 150e9, "int8": 300e9},
    link_bandwidth=5e9,
    link_seconds=60e-6,
    host_bandwidth=5e9,
    kernel_seconds=5e-6,
    step_seconds=500e-6,
    attention_share=0.3,
    overlaps=False,
    shares_machine=True,
)

# Kernels for GPUs after Hopper multiply by warp-level instructions (mma). A B200 has others of its own (tcgen05). There
# mma is assumed to have a quarter of the rate: that of an A100 per clock and multiprocessor.
HARDWARE: Mapping[str, Hardware] = {
    "h100": _gpu("h100", 3.35e12, 989e12, 495e12, 1979e12, nvlink=450e9),
    "h200": _gpu("h200", 4.8e12, 989e12, 495e12, 1979e12, nvlink=450e9),
    "b200": _gpu("b200", 7.7e12, 2250e12, 1100e12, 4500e12, nvlink=900e9, kernel_share=1 / 4),
    "rtxpro6000": _gpu("rtxpro6000", 1.79e12, 504e12, 252e12, 1008e12),
    "cpu": _CPU,
}


def hardware_for(device_kind: str) -> Hardware:
    """The hardware of a device of this kind, by JAX's name, calibrated or not; an unknown GPU counts as an H100."""
    kind = device_kind.lower().replace(" ", "")
    return HARDWARE[next((name for name in HARDWARE if name in kind), "h100")]
