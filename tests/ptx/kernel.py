"""Kernels for Mosaic GPU that are compiled for a GPU, and run by `machine` where they are called."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.state.types import AbstractRef
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.machine_code import dump
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped_matmul
from pallas_kernels.latent_prefill_attention import mosaic_gpu as latent_prefill_attention
from pallas_kernels.mosaic import in_place
from pallas_kernels.mosaic.card import card_for
from pallas_kernels.mosaic.warpgroup import Warpgroup
from pallas_kernels.paged_attention import mosaic_gpu as paged_attention
from pallas_kernels.ragged_prefill_attention import mosaic_gpu as ragged_prefill_attention
from sharding.targets import target_devices
from tests.ptx.launch import Launch, read_launch
from tests.ptx.machine import run
from tests.ptx.memory import LastOf

# XLA's threads, on which this is called, take denormal numbers for 0; a GPU does not.
_OWN_THREAD = ThreadPoolExecutor(1)
_OWN_THREAD.submit(int).result()  # begins now, as the main thread is
_LAUNCHES: dict[str, Launch] = {}  # by what was compiled, which is written down once


_Shape = tuple[int, ...]


def run_interpreted_kernels_as_compiled(
    target: str, monkeypatch: pytest.MonkeyPatch, larger: Mapping[_Shape, tuple[int, int]] | None = None
) -> None:
    """What asks for JAX's interpreter is from here on compiled for this card instead, and its PTX is run.

    `larger`: by an operand's shape, an axis and its length in the array that the kernel is compiled for, whose last part there the operand is.
    """
    larger = {} if larger is None else larger
    has_wgmma = card_for(target_devices(target, 1)[0]).has_wgmma

    def kernel(self: Warpgroup, body: Callable[..., None], name: str, **options: Any) -> Callable[..., Any]:
        return _runner(target, plgpu.kernel(body, kernel_name=name, **options), options["out_type"], larger)

    def kernel_in_place(warpgroup: Warpgroup, body: Callable[..., None], name: str, **options: Any) -> Callable[..., Any]:
        return _runner(target, in_place.kernel_in_place(warpgroup, body, name, **options), options["out_type"], larger)

    monkeypatch.setattr(Warpgroup, "kernel", kernel)
    monkeypatch.setattr(paged_attention, "kernel_in_place", kernel_in_place)
    for module in (grouped_matmul, latent_prefill_attention, paged_attention, ragged_prefill_attention):
        monkeypatch.setattr(module, "Warpgroup", lambda *_: Warpgroup(interpreted=False, has_wgmma=has_wgmma))


def _runner(target: str, kernel: Callable[..., Any], out_type: Any, larger: Mapping[_Shape, tuple[int, int]]) -> Callable[..., Any]:
    """Called as the kernel is, inside of `jax.jit` or not. References among its arguments hold afterwards what it has written there."""

    def call(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        is_written = [isinstance(jax.typeof(leaf), AbstractRef) for leaf in leaves]
        written = [leaf for leaf, is_ in zip(leaves, is_written, strict=True) if is_]
        values = [leaf[...] if is_ else leaf for leaf, is_ in zip(leaves, is_written, strict=True)]
        out_types = jax.tree.leaves(out_type)

        def compiled(*values: Any) -> Any:
            refs = [jax.new_ref(v, memory_space=plgpu.GMEM) if is_ else v for v, is_ in zip(values, is_written, strict=True)]
            return kernel(*jax.tree.unflatten(structure, refs)), [jax.freeze(ref) for ref, is_ in zip(refs, is_written, strict=True) if is_]

        def on_host(*values: Any) -> Any:
            parts = [np.array(value) for value in values]
            operands = [LastOf(part, *larger[part.shape]) if part.shape in larger else part for part in parts]
            results = [np.full(of.shape, np.nan, of.dtype) for of in out_types]
            changed = [operand for operand, is_ in zip(operands, is_written, strict=True) if is_]
            types = [jax.ShapeDtypeStruct(of.shape, of.dtype) for of in operands]
            _OWN_THREAD.submit(run, _launch(target, compiled, types), [*operands, *results, *changed]).result()
            return results, [part for part, is_ in zip(parts, is_written, strict=True) if is_]

        shapes = [jax.ShapeDtypeStruct(of.shape, of.dtype) for of in out_types], [jax.typeof(ref[...]) for ref in written]
        results, changed = jax.pure_callback(on_host, shapes, *values)
        for ref, value in zip(written, changed, strict=True):
            ref[...] = value
        return jax.tree.unflatten(jax.tree.structure(out_type), results)

    return call


def _launch(target: str, compiled: Callable[..., Any], values: Any) -> Launch:
    with tempfile.TemporaryDirectory() as folder:
        text = dump(compiled, values, target, Path(folder))
        if text not in _LAUNCHES:
            _LAUNCHES[text] = read_launch(Path(folder))
        return _LAUNCHES[text]
