"""A dry run: what a model comes to on cards that this machine doesn't have, from its shapes alone, by compiling the engine's own programs for them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxinfer.config import ConfigError, format_bytes
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import PageSpec
from jaxinfer.layers import moe
from jaxinfer.layers.matrices import ExpertFormat, MatrixFormat
from jaxinfer.models.config import ArchitectureConfig
from jaxinfer.models.registry import read_config
from jaxinfer.plan import choose_attention, most_tokens
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.runtime.compilation import compile_program
from jaxinfer.runtime.stage import Stage
from jaxinfer.runtime.template import ModelTemplate, make_template
from sharding.mesh import TENSOR, make_mesh
from sharding.rules import TENSOR_PARALLEL
from sharding.targets import card_memory, known_cards, target_devices

_BFLOAT16 = jnp.dtype("bfloat16")
_QUANTISED: Mapping[Any, Literal["int4", "fp8"]] = {"compressed-tensors": "int4", "fp8": "fp8"}
_POOL_PAGES = 64  # of the pool that programs are compiled with: what else they need does not depend on it
# Of each card, what no compiled program shows: the driver's context, loaded kernels, buffers for collectives. Set aside, not measured.
_RESERVED_BYTES = 3 * 2**29


@dataclass(frozen=True)
class Target:
    """So many of one card in one machine, such as '8xh100'."""

    card: str
    num_devices: int

    @classmethod
    def of(cls, name: str) -> Target:
        """Raises `ConfigError` for what is no such name."""
        match = re.fullmatch(r"(\d+)x(\w+)", name)
        if match is None or match[2] not in known_cards() or int(match[1]) < 1:
            raise ConfigError(f"target is {name!r}: it must be a number and a card, such as 8xh100; known are {', '.join(known_cards())}")
        return cls(match[2], int(match[1]))

    def __str__(self) -> str:
        return f"{self.num_devices}x{self.card}"


@dataclass(frozen=True)
class DryRun:
    """Bytes are those of each device; all have the same."""

    target: Target
    is_compiled: bool  # activations are those of compiled programs; else estimated
    matrices: str
    total_bytes: int
    reserved_bytes: int
    weight_bytes: int
    activation_bytes: int  # temporaries of the program that needs most, and what stays beside weights and pages
    page_bytes: int
    token_bytes: int  # of KV, in all, that a token of a long context costs: what only layers without a bound still attend to
    kv_tokens: int  # of one context, if it has all pages
    context: int  # tokens that it has to hold
    notes: tuple[str, ...]  # what was chosen, and why

    @property
    def kv_bytes(self) -> int:
        return max(self.total_bytes - self.reserved_bytes - self.weight_bytes - self.activation_bytes, 0)

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= self.context

    def as_json(self) -> dict[str, Any]:
        """What `jaxinfer plan --json` prints."""
        device = {
            "weights_bytes": self.weight_bytes,
            "activation_bytes": self.activation_bytes,
            "kv_bytes": self.kv_bytes,
            "reserved_bytes": self.reserved_bytes,
        }
        layout = {"tp": self.target.num_devices, "pp": 1}
        return {
            "target": str(self.target),
            "fits": self.fits,
            "compiled": self.is_compiled,
            "devices": [device] * self.target.num_devices,
            "kv_tokens": self.kv_tokens,
            "prefill_parallel": layout,
            "decode_parallel": layout,
            "matrices": self.matrices,
            "notes": list(self.notes),
        }


def dry_run(
    config: Mapping[str, Any], target: Target, *, context: int | None = None, batch: int = 32, chunk_size: int = 2048, page_size: int = 16
) -> DryRun:
    """Of a model, by the keys of its config.json, split over all of the target's cards, prefill and decode on the same ones.

    Raises `UnsupportedModelError` for a model that can't be served, `ConfigError` for one whose axes these cards don't divide.
    """
    architecture = read_config(config)
    context = min(context or 8192, architecture.max_position_embeddings)
    template, notes = _template(architecture, config, target)
    spec = PageSpec.of(architecture, page_size, _BFLOAT16.itemsize)
    mesh = AbstractMesh((target.num_devices,), (TENSOR,), axis_types=(AxisType.Explicit,))
    try:
        weights = template.abstract(mesh, TENSOR_PARALLEL)  # type: ignore[arg-type]  # it takes whatever has sizes
        PagePool(spec, _POOL_PAGES, _BFLOAT16, mesh, TENSOR_PARALLEL)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"target is {target}: {error}") from error
    weight_bytes = sum(math.prod(w.sharding.shard_shape(w.shape)) * w.dtype.itemsize for w in weights)
    of_device = spec if spec.num_sides == 1 else replace(spec, num_kv_heads=spec.num_kv_heads // target.num_devices)
    try:
        activations = _compiled(architecture, template, spec, target, weight_bytes, context, batch, chunk_size)
        is_compiled = True
    except RuntimeError as error:  # there is no compiler for these cards here
        activations, is_compiled = _estimated(architecture, batch, chunk_size), False
        notes.append(str(error))
    made = DryRun(
        target,
        is_compiled,
        str(template.form),
        card_memory(target.card),
        _RESERVED_BYTES,
        weight_bytes,
        activations,
        of_device.page_bytes,
        spec.lasting_token_bytes,
        0,
        context,
        tuple(notes),
    )
    num_pages = made.kv_bytes // of_device.page_bytes
    return replace(made, kv_tokens=max(most_tokens(spec, num_pages - 1, chunk_size, num_pages * page_size), 0) if num_pages > 1 else 0)


def smallest_that_fits(config: Mapping[str, Any], run: DryRun) -> Target | None:
    """The fewest of the same card that would do, by arithmetic: powers of two up to 64; None if not even those."""
    for num_devices in (2**n for n in range(7)):
        target = Target(run.target.card, num_devices)
        shared = run.weight_bytes * run.target.num_devices / num_devices
        if num_devices > run.target.num_devices and shared + run.activation_bytes + run.reserved_bytes + 2**30 < run.total_bytes:
            try:
                _template(read_config(config), config, target)
            except ConfigError:
                continue
            return target
    return None


def _template(architecture: ArchitectureConfig, config: Mapping[str, Any], target: Target) -> tuple[ModelTemplate, list[str]]:
    """In bfloat16, experts as the published checkpoint has them."""
    quantisation = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    packing = _QUANTISED.get(quantisation.get("quant_method"))
    form = MatrixFormat(_BFLOAT16)
    template = make_template(architecture, form)
    experts = next((leaf for leaf in template.leaves if leaf.is_of_experts), None)
    if experts is None:
        return template, []
    sizes = dict(zip(experts.axes, experts.shape, strict=True))
    packed = replace(form, experts=ExpertFormat(packing=packing))
    against = moe.why_not(sizes["embed"], sizes["expert_mlp"], target.num_devices, packed, _BFLOAT16)
    if packing is not None and against is not None:
        packed = form
    backend: Literal["mosaic_gpu", "xla"] = "xla" if against else "mosaic_gpu"
    chosen = replace(packed, experts=replace(packed.experts, backend=backend))
    return make_template(architecture, chosen), [f"products with experts: {backend}" + (f" ({against})" if against else "")]


def _compiled(
    architecture: ArchitectureConfig,
    template: ModelTemplate,
    spec: PageSpec,
    target: Target,
    weight_bytes: int,
    context: int,
    batch: int,
    chunk_size: int,
) -> int:
    """Bytes on each device beside weights and pages, read from the programs compiled for it. Raises `RuntimeError` where none can be."""
    mesh = make_mesh(range(target.num_devices), target_devices(target.card, target.num_devices))
    pool = PagePool(spec, _POOL_PAGES, _BFLOAT16, mesh, TENSOR_PARALLEL)
    group = architecture.num_heads // (spec.num_kv_heads if spec.num_sides == 2 else target.num_devices)

    def attention(role: str, sizes: Sequence[int]) -> Any:
        return choose_attention(role, "auto", mesh.devices.flat[0], _BFLOAT16, group, spec, sizes, architecture.soft_cap)

    def stage(role: str) -> Stage:
        return Stage(template, mesh, TENSOR_PARALLEL, pool, attention(role, (chunk_size,)))

    decode, prefill = DecodeRunner([stage("decode")], (batch,), context), PrefillRunner([stage("prefill")], (chunk_size,), context)
    sources = {source.name: source for source in (*decode.programs(), *prefill.programs())}
    stays, temporaries = 0, 0
    for name in (f"decode/{batch}", f"prefill/{chunk_size}"):
        memory = compile_program(sources[name]).memory_analysis()
        assert memory is not None
        stays += max(memory.argument_size_in_bytes - weight_bytes - pool.device_bytes, 0)
        # What is not written where it was is held twice while the program runs.
        copied = memory.output_size_in_bytes - memory.alias_size_in_bytes
        temporaries = max(temporaries, memory.temp_size_in_bytes + copied)
    return stays + temporaries


def _estimated(architecture: ArchitectureConfig, batch: int, chunk_size: int) -> int:
    """A few numbers a word of the vocabulary for each row that is sampled, a few times the MLP's width for each token."""
    return 4 * (6 * batch * architecture.vocab_size + 3 * chunk_size * (2 * architecture.mlp_size + architecture.hidden_size))


def describe(run: DryRun) -> list[tuple[str, str]]:
    """Rows of a table."""
    n = run.target.num_devices
    return [
        ("target", f"{run.target}, {format_bytes(run.total_bytes)} a device"),
        ("layout", f"prefill and decode on the same {n} device(s), tensor parallel {n}"),
        ("matrices", run.matrices),
        ("weights", f"{format_bytes(run.weight_bytes)} a device, {format_bytes(n * run.weight_bytes)} in all"),
        ("activations", f"{format_bytes(run.activation_bytes)} a device, {'compiled' if run.is_compiled else 'estimated'}"),
        ("set aside", f"{format_bytes(run.reserved_bytes)} a device for the driver and collectives: not measured"),
        ("KV pages", f"{format_bytes(run.kv_bytes)} a device, {format_bytes(n * run.kv_bytes)} in all"),
        ("context", f"{run.kv_tokens:,} tokens fit; each of a long one costs {format_bytes(run.token_bytes)}"),
        *(("note", note) for note in run.notes),
    ]
