"""What sampling must do, one row at a time in plain NumPy."""

from __future__ import annotations

import numpy as np

from jaxinfer.request import SamplingParams


def adjusted(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], end_tokens: list[int]) -> np.ndarray:
    """Logits [V] after penalties, biases and the ban on ending early, float64."""
    scores = logits.astype(np.float64)
    for token in {*prompt, *output}:
        scores[token] = scores[token] / params.repetition_penalty if scores[token] > 0 else scores[token] * params.repetition_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if len(output) < params.min_tokens:
        scores[end_tokens] = -np.inf
    return scores


def probabilities(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Of each token: temperature, then what min_p, top_k and top_p leave, in that order. Tokens of equal score stay or go together."""
    scaled = scores / params.temperature
    p = np.exp(scaled - scaled.max())
    p[p < params.min_p] = 0.0
    if params.top_k:
        p[scores < np.sort(scores)[::-1][: params.top_k][-1]] = 0.0
    if params.top_p < 1.0:
        best_first = np.argsort(-p, kind="stable")
        needed = np.searchsorted(np.cumsum(p[best_first]), params.top_p * p.sum()) + 1
        p[p < p[best_first[needed - 1]]] = 0.0
    return p / p.sum()
