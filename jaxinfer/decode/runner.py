"""DecodeRunner: the decode mesh's arrays and compiled programs, and one call a step."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.decode.batch import DecodeBatch, empty_batch
from jaxinfer.decode.program import DecodeState, decode_step, seat
from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.runtime.compilation import Executable, ProgramSource, abstract_like
from jaxinfer.runtime.template import ModelTemplate, Weights
from jaxinfer.sampling.counting import abstract_counts, reset_arguments, reset_program
from jaxinfer.sampling.params import SamplingRows, neutral_rows
from jaxinfer.sampling.sampler import Sampled
from pallas_kernels.dispatch import Backend
from sharding.mesh import is_cpu
from sharding.partition import place, replicated
from sharding.rules import Rules

# On a CPU XLA takes matrix products from YNNPACK, which for 2 to 16 rows of float32 is 15 to 25% slower than Eigen; without it only for these.
_EIGEN_ROWS = range(2, 17)
_XLA_FLOAT32 = MatrixFormat(np.dtype("float32"))
_EIGEN_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


class DecodeRunner:
    def __init__(
        self,
        template: ModelTemplate,
        mesh: Mesh,
        rules: Rules,
        pool: PagePool,
        buckets: tuple[int, ...],
        max_model_len: int,
        attention: Backend,
    ) -> None:
        self._pool = pool
        self._mesh = mesh
        self._is_on_accelerator = not is_cpu(mesh)
        self._max_model_len = max_model_len
        self.buckets = buckets
        self.num_slots = buckets[-1]
        self.num_groups = pool.spec.num_groups
        self.table_width = pool.spec.runs_for(max_model_len) * self.num_groups
        self._abstract_weights = template.abstract(mesh, rules)
        on_mesh = replicated(mesh)
        counts = abstract_counts(self.num_slots + 1, template.config.vocab_size, on_mesh)
        self._abstract_state = DecodeState(
            jax.ShapeDtypeStruct((self.num_slots + 1,), np.int32, sharding=on_mesh),
            jax.ShapeDtypeStruct((self.num_slots + 1, self.table_width), np.int32, sharding=on_mesh),
            counts,
        )
        self._step = decode_step(template, mesh, attention)
        self._form = template.form
        self._programs: dict[str, Executable] = {}
        self._weights: Weights = ()
        self._state: DecodeState | None = None

    def programs(self) -> list[ProgramSource]:
        """What to compile: a decode program a bucket, and for sequences that join the ones that take their page tables and, for
        penalties, count their tokens."""
        seat_arguments = abstract_like(self._seat_arguments(0, ()), replicated(self._mesh))
        return [
            ProgramSource(
                f"decode/{size}",
                self._step,
                (
                    self._abstract_weights,
                    self._pool.abstract,
                    self._abstract_state,
                    abstract_like(empty_batch(size, self.num_slots, self.num_groups), replicated(self._mesh)),
                    abstract_like(neutral_rows(size), replicated(self._mesh)),
                ),
                self._mesh,
                donated=(1, 2),
                options=_xla_options(size, self._mesh, self._form),
            )
            for size in self.buckets
        ] + [
            ProgramSource("decode/seat", seat, (self._abstract_state.page_table, *seat_arguments), self._mesh, donated=(0,)),
            reset_program("decode/reset", self._abstract_state.counts, self._max_model_len, self._mesh),
        ]

    def start(self, programs: dict[str, Executable], weights: Weights) -> None:
        """Take the compiled programs and the weights; allocate what else stays on the device."""
        self._programs, self._weights = programs, weights
        self._state = place(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self._abstract_state), replicated(self._mesh))

    def seat(self, slot: int, page_ids: Sequence[int]) -> None:
        """Make a sequence's page table known to a slot."""
        assert self._state is not None
        page_table = self._programs["decode/seat"](self._state.page_table, *self._seat_arguments(slot, page_ids))
        self._state = self._state._replace(page_table=page_table)

    def _seat_arguments(self, slot: int, page_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        row = np.full(self.table_width, NULL_PAGE, np.int32)
        row[: len(page_ids)] = page_ids
        return np.asarray(slot, np.int32), row

    def count_tokens(self, slot: int, token_ids: Sequence[int], num_prompt: int) -> None:
        """Make a sequence's tokens known to the penalties of a slot."""
        assert self._state is not None
        arguments = reset_arguments(slot, token_ids, num_prompt, self._max_model_len)
        self._state = self._state._replace(counts=self._programs["decode/reset"](self._state.counts, *arguments))

    def put(self, rows: SamplingRows) -> SamplingRows:
        """Sampling parameters on the device, for all the steps that share them."""
        return place(rows, replicated(self._mesh))

    def run(self, batch: DecodeBatch, rows: SamplingRows) -> Sampled:
        """Start one step; returns arrays that the device is yet to fill."""
        program = self._programs[f"decode/{len(batch.slots)}"]
        self._pool.array, self._state, sampled = program(self._weights, self._pool.array, self._state, batch, rows)
        if self._is_on_accelerator:  # else the host reads them where they are
            sampled.packed.copy_to_host_async()
        return sampled


def _xla_options(num_rows: int, mesh: Mesh, form: MatrixFormat) -> dict[str, str]:
    return _EIGEN_OPTIONS if is_cpu(mesh) and form == _XLA_FLOAT32 and num_rows in _EIGEN_ROWS else {}
