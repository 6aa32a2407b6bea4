"""Calibration: measures this machine's processor. Matrix products are timed alone; other costs are fitted to steps of
the engine's own programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
from scipy.optimize import nnls

from jaxinfer.planner.cost import stage_costs
from jaxinfer.planner.matmul_bench import chains, rates
from jaxinfer.planner.placement import RolePlacement
from jaxinfer.planner.step_bench import StepBench, decode_bench, prefill_bench, timed
from jaxinfer.planner.target import CPU, Target
from jaxinfer.planner.target_model import TargetModel
from sharding.cost_model import StepCost
from sharding.hardware import HARDWARE, Hardware
from sharding.layout import Parallel

_NARROW, _DEEP, _WIDE = (64, 256, 2, 1024), (64, 256, 16, 1024), (768, 2048, 4, 16384)  # hidden, MLP, layers, vocab
NUM_ROUNDS = 8
MOST_DEVICES = 4  # virtual devices that collectives are measured on
_LINK = 3  # the column of `_counts` for collectives
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class CalibrationFit:
    """A measured step and its time by the fitted costs."""

    name: str
    measured: float  # seconds
    predicted: float

    @property
    def error(self) -> float:
        """As a share of the measured time."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class CalibrationCase:
    """A step that can be run, and its layout."""

    name: str
    shape: RolePlacement
    bench: StepBench


class Calibration:
    """Steps to time, and the hardware description that follows from their times. Compiling takes a minute or two. With
    two virtual devices, better `MOST_DEVICES`, collectives are fitted too; otherwise they keep their default costs."""

    def __init__(self) -> None:
        self._chains = chains(jax.devices("cpu")[0])
        self._cases = list(_cases())

    @property
    def runs(self) -> list[Callable[[], None]]:
        return [*(chain.run for chain in self._chains), *(case.bench.run for case in self._cases)]

    def result(self, seconds: Sequence[float]) -> tuple[Hardware, list[CalibrationFit]]:
        """The fitted hardware, and each case with its error. `seconds`: of each of `runs`."""
        of_chains, of_cases = seconds[: len(self._chains)], seconds[len(self._chains) :]
        hardware = fit(with_products(rates(self._chains, of_chains)), self._cases, of_cases)
        return hardware, [
            CalibrationFit(case.name, taken, predicted(case, hardware)) for case, taken in zip(self._cases, of_cases, strict=True)
        ]


def calibrate(say: Callable[[str], None] = lambda line: None) -> tuple[Hardware, list[CalibrationFit]]:
    """Time and fit; takes two minutes at most. `say` gets lines of progress."""
    say("calibrating: compiling")
    calibration = Calibration()
    say(f"calibrating: {len(calibration.runs)} products and steps, {NUM_ROUNDS} rounds")
    return calibration.result(timed(calibration.runs, NUM_ROUNDS))


def with_products(measured: dict[str, dict[int, float]]) -> Hardware:
    """Hardware with these product rates, by type and rows; products of one row give its memory bandwidth."""
    of_one = {name: of_type[1] / 2 * _ITEM_BYTES[name] for name, of_type in measured.items()}
    return replace(
        HARDWARE[CPU],
        bandwidth=max(of_one.values()),
        matmul_rates={**HARDWARE[CPU].matmul_rates, **{name: max(of_type.values()) for name, of_type in measured.items()}},
        product_rates=measured,
        num_cores=len(os.sched_getaffinity(0)),
        is_measured=True,
    )


def fit(known: Hardware, cases: Sequence[CalibrationCase], seconds: Sequence[float]) -> Hardware:
    """The hardware whose costs come closest to the measured times: least squares of relative errors, none negative."""
    counts = np.array([_counts(known, case) for case in cases])
    of_known, measured = counts[:, 0], np.array(seconds)
    unknown = [column for column in range(1, counts.shape[1]) if counts[:, column].any()]
    shares = counts[:, unknown] / measured[:, None]
    found = dict(zip(unknown, nnls(shares, np.maximum(1 - of_known / measured, 0.0))[0].tolist(), strict=True))
    per_pair, per_moved, link, per_link_byte, kernel, step = (found.get(column, 0.0) for column in range(1, counts.shape[1]))
    return replace(
        known,
        attention_share=_inverse(per_pair) / known.rate("bfloat16"),
        activation_bandwidth=_inverse(per_moved),
        link_seconds=link if _LINK in found else known.link_seconds,
        link_bandwidth=_inverse(per_link_byte) if _LINK in found else known.link_bandwidth,
        kernel_seconds=kernel,
        step_seconds=step,
    )


def predicted(case: CalibrationCase, hardware: Hardware) -> float:
    """Seconds, of the slowest stage."""
    costs = stage_costs(case.shape, case.bench.step, hardware.shared_by(case.shape.layout.num_devices))
    return max(cost.seconds for cost in costs)


def _inverse(seconds: float) -> float:
    """A rate; a cost too small to measure counts as 10^15 a second."""
    return 1 / max(seconds, 1e-15)


def _counts(known: Hardware, case: CalibrationCase) -> list[float]:
    """Costs of one step: seconds of products and of reading their inputs and the KV cache, then the amounts to be
    fitted: attention values, activation bytes, collectives, their bytes, kernels, calls."""
    rate = {"attention_share": 1 / known.rate("bfloat16")}
    nothing = {"link_seconds": 0.0, "link_bandwidth": np.inf, "kernel_seconds": 0.0, "step_seconds": 0.0, "activation_bandwidth": np.inf}

    def cost(**figures: float) -> StepCost:
        hardware = replace(known, **{**nothing, **figures})  # type: ignore[arg-type]
        return stage_costs(case.shape, case.bench.step, hardware.shared_by(case.shape.layout.num_devices))[0]

    return [
        cost(attention_share=np.inf).seconds,
        cost(**rate).attention,
        cost(activation_bandwidth=1.0).activations,
        cost(link_seconds=1.0).collectives,
        cost(link_bandwidth=1.0).collectives,
        cost(kernel_seconds=1.0).starts,
        cost(step_seconds=1.0).starts,
    ]


def _cases() -> Iterator[CalibrationCase]:
    """Narrow and wide, shallow and deep, few and many tokens, short and long contexts, so that each cost dominates
    some step."""
    target = Target(CPU, 1)
    for name, sizes, dtype in (
        ("narrow", _NARROW, "float32"),
        ("deep", _DEEP, "float32"),
        ("wide", _WIDE, "float32"),
        ("wide", _WIDE, "bfloat16"),
    ):
        placement = TargetModel(_config(*sizes), target, dtype=dtype).place_shared(Parallel())
        shape = placement.decode
        decode, prefill = partial(decode_bench, placement.decode, target), partial(prefill_bench, placement.prefill, target)
        of_wide = name == "wide"
        for batch, context in ((1, 64), (8, 64), (32, 64), (16, 1024)) if of_wide else ((1, 64),):
            yield CalibrationCase(f"{name} {dtype}, decode {batch} of {context}", shape, decode(batch, context))
        for num_tokens in (128, 512) if of_wide else (32,):
            yield CalibrationCase(f"{name} {dtype}, prefill {num_tokens}", shape, prefill(num_tokens))
    for num_devices in (2, MOST_DEVICES):  # two sizes separate collectives' latency from their bandwidth
        if jax.device_count("cpu") < num_devices:
            return
        target = Target(CPU, num_devices)
        for name, sizes in (("deep", _DEEP), ("wide", _WIDE)):
            placement = TargetModel(_config(*sizes), target).place_shared(Parallel(num_devices))
            shape = placement.decode
            yield CalibrationCase(f"{name} on {num_devices}, decode 4 of 64", shape, decode_bench(placement.decode, target, 4, 64))
            if name == "wide":
                yield CalibrationCase(f"{name} on {num_devices}, prefill 512", shape, prefill_bench(placement.prefill, target, 512))


def _config(hidden_size: int, mlp_size: int, num_layers: int, vocab_size: int) -> dict[str, object]:
    """config.json of a Llama of these sizes."""
    heads = hidden_size // 32 if hidden_size < 512 else hidden_size // 64
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "intermediate_size": mlp_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 3, 2),
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
