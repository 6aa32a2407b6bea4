"""ServedWeights: an engine's weights on its meshes: loaded, set aside in host memory, dropped, replaced by others of
the same shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields

import jax

from checkpoints.source import CheckpointError, TensorSource
from jaxinfer.config import EngineConfig
from jaxinfer.decode.runner import DecodeRunner
from jaxinfer.engine.kv_scales import CalibratedScales
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.models.registry import config_of
from jaxinfer.pipeline.stage import StagedWeights
from jaxinfer.planner.engine_plan import Plan, RolePlan, place
from jaxinfer.prefill.runner import PrefillRunner
from jaxinfer.programs.compilation import COUNTER
from jaxinfer.stats import EngineStats
from jaxinfer.weights.formats.weight_format import MatrixAxes
from jaxinfer.weights.kv_scales import stored_kv_scales
from jaxinfer.weights.load import check_tensors, load_weights, random_weights

_HOST_MEMORY = "pinned_host"


class ServedWeights:
    """`prefill`, `decode`: one tuple of arrays a stage, the same ones where both roles share a mesh; empty while they
    are dropped. `pools`: page pools, one list a role, which are let go of together with the weights."""

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        source: TensorSource,
        pools: Sequence[Sequence[PagePool]],
        stats: EngineStats,
        incompressible: frozenset[MatrixAxes] = frozenset(),
    ) -> None:
        self.prefill: StagedWeights = ()
        self.decode: StagedWeights = ()
        self._config, self._plan, self._incompressible, self._stats = config, plan, incompressible, stats
        self.source_config, self._architecture = source.config, config_of(source)
        # What is served now can be read again from here; None: a caller gave it, and it isn't kept.
        self._source: TensorSource | None = source
        self._is_random = config.model.random_weights
        self._pools = [pool for of_role in pools for pool in of_role]
        self._runners: tuple[PrefillRunner, DecodeRunner] | None = None
        self._kv_scales: CalibratedScales | None = None
        self._served: TensorSource | None = source  # what the weights are of, whether or not it can be read again

    @property
    def is_loaded(self) -> bool:
        """Whether there are arrays, on the devices or in host memory."""
        return bool(self.decode)

    def load(self) -> None:
        """Read the weights that the engine starts with, and allocate the pages. Raises `CheckpointError`."""
        source, stats, started = self._source, self._stats, time.monotonic()
        assert source is not None
        num_bytes = 0 if self._is_random else sum(source.stored(name).num_bytes for name in source.names())
        num_bytes *= 1 if self._plan.shares_mesh else 2
        with stats.start.measured("loading weights", num_bytes, lambda: source.bytes_read):
            self._read(source)
            self.allocate_pages()
        stats.load_seconds += time.monotonic() - started

    def scale_pages(self, kv_scales: CalibratedScales | None = None) -> None:
        """Set the scales of float8 pages for these weights, which overwrites some pages. `kv_scales`: does it, from now
        on. Raises `CheckpointError`."""
        self._kv_scales = kv_scales or self._kv_scales
        if self._kv_scales is not None:
            self._kv_scales.set(None if self._is_random else self._served)

    def start(self, prefill: PrefillRunner, decode: DecodeRunner) -> None:
        """From now on these runners are given what is loaded."""
        self._runners = prefill, decode

    def check(self, source: TensorSource) -> None:
        """Raise `CheckpointError` for a checkpoint whose weights the engine's programs can't take: another model's, or
        of another format. Reads no tensor."""
        architecture, served = config_of(source), self._architecture
        other = [field.name for field in fields(served) if getattr(served, field.name) != getattr(architecture, field.name, None)]
        if other:
            raise CheckpointError(f"{source.path}: another model than the one served, by {', '.join(other)}: start an engine with it")
        device = self._plan.prefill.devices[0]
        template = place(self._config, architecture, source, self._incompressible, device).template
        if template != self._plan.template:
            raise CheckpointError(
                f"{source.path}: these weights would be {template.weight_format}, and this engine was compiled for "
                f"{self._plan.template.weight_format}: start it with weights that both can be, such as --weights dequantised"
            )
        check_tensors(template, source)
        if self._plan.page_spec.is_float8:
            stored_kv_scales(source, template.model.weight_map, architecture)

    def replace(self, source: TensorSource, *, is_kept: bool) -> None:
        """Load other weights in place of these, which are dropped first: there is no memory for both. `is_kept`:
        whether the source can be read again. If loading fails, those before are read again if they can be; raises what
        failed."""
        former = self._source, self._is_random, self._served
        self.drop()
        try:
            self._is_random = False
            self._read(source)
        except BaseException:
            self.drop()
            self._source, self._is_random, self._served = former
            if self._source is not None:
                self.restore()
            raise
        self._source, self._served = source if is_kept else None, source
        self._give(self.prefill, self.decode)

    def to_host(self) -> None:
        """Move the weights from the devices to host memory, where they are already on CPUs."""
        self.decode = self._moved(self.decode, to_host=True)
        self.prefill = self.decode if self._plan.shares_mesh else self._moved(self.prefill, to_host=True)
        self._give((), ())

    def drop(self) -> None:
        """Let go of the weights."""
        self.prefill = self.decode = ()
        self._give((), ())

    def restore(self) -> None:
        """Bring the weights back to the devices, from host memory or from where they were read. Raises
        `CheckpointError`, also for arrays that a caller gave, which are not kept."""
        if self.is_loaded:
            self.decode = self._moved(self.decode, to_host=False)
            self.prefill = self.decode if self._plan.shares_mesh else self._moved(self.prefill, to_host=False)
        elif self._source is None:
            raise CheckpointError("the weights were given as arrays, and are dropped: give them again (update_params)")
        else:
            self._read(self._source)
        self._give(self.prefill, self.decode)

    def release_pages(self) -> None:
        """Let go of the pages' memory."""
        for pool in self._pools:
            pool.release()

    @property
    def has_pages(self) -> bool:
        return all(pool.is_allocated for pool in self._pools)

    def allocate_pages(self) -> None:
        """Allocate all pages."""
        with COUNTER.compiling():
            for pool in self._pools:
                pool.allocate()
            jax.block_until_ready([pool.array for pool in self._pools])

    def _give(self, prefill: StagedWeights, decode: StagedWeights) -> None:
        if self._runners is not None:
            self._runners[0].set_weights(prefill)
            self._runners[1].set_weights(decode)

    def _read(self, source: TensorSource) -> None:
        with COUNTER.compiling():
            self.decode = self._weights_of(self._plan.decode, source)
            self.prefill = self.decode if self._plan.shares_mesh else self._weights_of(self._plan.prefill, source)
            jax.block_until_ready((self.decode, self.prefill))

    def _weights_of(self, role: RolePlan, source: TensorSource) -> StagedWeights:
        if self._is_random:
            return tuple(random_weights(stage.template, stage.mesh, role.rules) for stage in role.stages)
        return tuple(load_weights(stage.template, source, stage.mesh, role.rules) for stage in role.stages)

    @staticmethod
    def _moved(weights: StagedWeights, *, to_host: bool) -> StagedWeights:
        def moved(array: jax.Array) -> jax.Array:
            if array.devices() and next(iter(array.devices())).platform == "cpu":
                return array
            return jax.device_put(array, array.sharding.with_memory_kind(_HOST_MEMORY if to_host else "device"))

        result = tuple(tuple(map(moved, of_stage)) for of_stage in weights)
        return jax.block_until_ready(result)
