"""Routing and experts as a loop over tokens and experts, in NumPy and float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxinfer.architecture.model_config import Routing


def route(routing: Routing, logits: np.ndarray, bias: np.ndarray | None = None) -> list[dict[int, float]]:
    """For each token, its experts' weights."""
    found = []
    for row in np.asarray(logits, np.float64):
        exponentials = np.exp(row - row.max())
        scores = exponentials / exponentials.sum() if routing.scoring == "softmax" else 1 / (1 + np.exp(-row))
        ranked = scores if bias is None else scores + bias
        groups = np.split(np.arange(len(row)), routing.num_groups)
        best_first = sorted(groups, key=lambda group: -sum(sorted(ranked[group])[-2:]))
        allowed = np.concatenate(best_first[: routing.top_groups])
        chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: routing.top_k]
        total = sum(scores[chosen]) if routing.normalises else 1.0
        found.append({int(expert): float(scores[expert] / total * routing.scale) for expert in chosen})
    return found


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def mixture(routing: Routing, values: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """What `MixtureOfExperts` with these values makes of x."""
    wide = {name: np.asarray(value, np.float64) for name, value in values.items()}
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for token, weights in enumerate(route(routing, x @ wide["router.kernel"], wide.get("router.bias"))):
        for expert, weight in weights.items():
            taken = x[token] * (weight if routing.scales_input else 1.0)
            gate, up = np.moveaxis(np.tensordot(taken, wide["experts.gate_up"][expert], 1), 0, 0)
            given = (silu(gate) * up) @ wide["experts.down"][expert]
            out[token] += given * (1.0 if routing.scales_input else weight)
    if "shared.down.kernel" in wide:
        gate, up = np.moveaxis(np.tensordot(x, wide["shared.gate_up.kernel"], 1), 1, 0)
        out += (silu(gate) * up) @ wide["shared.down.kernel"]
    return out
