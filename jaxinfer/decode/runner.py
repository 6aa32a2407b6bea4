"""DecodeRunner: the decode mesh's arrays and compiled programs, and one call a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxinfer.decode.batch import DecodeBatch, empty_batch
from jaxinfer.decode.program import DecodeState, decode_step, seat
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.runtime.compilation import Executable, ProgramSource, abstract_like
from jaxinfer.runtime.expert_loads import ExpertLoads
from jaxinfer.runtime.stage import Stage, StagedWeights, abstract_hidden, pass_on, program_name
from jaxinfer.runtime.stage_clock import Ended, StageClock
from jaxinfer.sampling.counting import abstract_counts, reset_arguments, reset_program
from jaxinfer.sampling.params import SamplingRows, neutral_rows
from jaxinfer.sampling.sampler import Sampled
from sharding.mesh import is_cpu
from sharding.partition import place, replicated

# On a CPU XLA takes matrix products from YNNPACK, which for 2 to 16 rows of float32 is 15 to 25% slower than Eigen; without it only for these.
_EIGEN_ROWS = range(2, 17)
_XLA_FLOAT32 = MatrixFormat(np.dtype("float32"))
_EIGEN_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


class DecodeRunner:
    """With several stages as many steps are under way, so that none waits for another: the batch is cut into as many lanes, each with slots of its
    own. `seat` and `count_tokens` number the slots of all lanes through; a step's batch numbers those of its lane from 0."""

    def __init__(self, stages: Sequence[Stage], buckets: tuple[int, ...], max_model_len: int, clock: StageClock | None = None) -> None:
        """`clock`: is told of the steps, where there are several stages."""
        self._stages, self._clock = tuple(stages), clock
        self._first, self._last = self._stages[0], self._stages[-1]
        self.loads = ExpertLoads(stages)
        self._is_on_accelerator = not is_cpu(self._last.mesh)
        self._max_model_len = max_model_len
        self.buckets = buckets
        self.num_lanes = len(stages)
        self.num_slots = buckets[-1]  # of a lane
        spec = stages[0].pool.spec
        self.num_groups = spec.num_groups
        self.table_width = spec.runs_for(max_model_len) * self.num_groups
        self._abstract_states = [self._abstract_state(stage) for stage in stages]
        self._programs: dict[str, Executable] = {}
        self._weights: StagedWeights = ()
        self._states: list[list[DecodeState]] = []  # of each lane and stage
        self._ended: list[Ended | None] = [None] * self.num_lanes  # each lane's last step, on the last stage
        self._newest: list[tuple[Array, ...]] = [() for _ in stages]  # each lane's tokens, on the way from the last stage to the first

    def _abstract_state(self, stage: Stage) -> DecodeState:
        on_mesh, is_last = replicated(stage.mesh), stage is self._last
        return DecodeState(
            self._abstract_tokens(stage) if is_last else None,
            jax.ShapeDtypeStruct((self.num_slots + 1, self.table_width), np.int32, sharding=on_mesh),
            abstract_counts(self.num_slots + 1, stage.template.config.vocab_size, stage.mesh, stage.rules) if is_last else None,
        )

    def _abstract_tokens(self, stage: Stage) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_slots + 1,), np.int32, sharding=replicated(stage.mesh))

    def programs(self) -> list[ProgramSource]:
        """What to compile: a decode program a bucket and stage, and for sequences that join the ones that take their page tables and, for
        penalties, count their tokens."""
        sources = []
        for number, (stage, state) in enumerate(zip(self._stages, self._abstract_states, strict=True)):
            on_mesh, template = replicated(stage.mesh), stage.template
            step, weights = decode_step(template, stage.mesh, stage.attention), template.abstract(stage.mesh, stage.rules)
            for size in self.buckets:
                sampling = abstract_like(neutral_rows(size), on_mesh) if template.is_last else None
                batch = abstract_like(empty_batch(size, self.num_slots, self.num_groups), on_mesh)
                handed = self._abstract_tokens(stage) if template.is_first else abstract_hidden(stage, size)
                arguments = (weights, stage.pool.abstract, state, batch, sampling, self.loads.abstract[number])
                sources.append(
                    ProgramSource(
                        program_name(f"decode/{size}", self._stages, number),
                        step,
                        arguments if len(self._stages) == 1 else (*arguments, handed),
                        stage.mesh,
                        donated=(1, 2),
                        options=_xla_options(size, stage.mesh, template.form),
                    )
                )
            seat_arguments = abstract_like(self._seat_arguments(0, ()), on_mesh)
            name = program_name("decode/seat", self._stages, number)
            sources.append(ProgramSource(name, seat, (state.page_table, *seat_arguments), stage.mesh, donated=(0,)))
        counts = self._abstract_states[-1].counts
        assert counts is not None
        return [*sources, reset_program("decode/reset", counts, self._max_model_len, self._last.mesh)]

    def start(self, programs: dict[str, Executable], weights: StagedWeights) -> None:
        """Take the compiled programs and the weights; allocate what else stays on the devices."""
        self._programs, self._weights = programs, weights
        self.loads.reset()

        def empty(abstract: DecodeState) -> DecodeState:
            return jax.tree.map(lambda a: place(np.zeros(a.shape, a.dtype), a.sharding), abstract)

        self._states = [list(map(empty, self._abstract_states)) for _ in range(self.num_lanes)]
        for lane in range(self.num_lanes):
            self._hand_tokens(lane)

    def seat(self, slot: int, page_ids: Sequence[int]) -> None:
        """Make a sequence's page table known to a slot."""
        lane, of_lane = divmod(slot, self.num_slots)
        states = self._states[lane]
        for number, state in enumerate(states):
            program = self._programs[program_name("decode/seat", self._stages, number)]
            states[number] = state._replace(page_table=program(state.page_table, *self._seat_arguments(of_lane, page_ids)))

    def _seat_arguments(self, slot: int, page_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        row = np.full(self.table_width, NULL_PAGE, np.int32)
        row[: len(page_ids)] = page_ids
        return np.asarray(slot, np.int32), row

    def count_tokens(self, slot: int, token_ids: Sequence[int], num_prompt: int) -> None:
        """Make a sequence's tokens known to the penalties of a slot."""
        lane, of_lane = divmod(slot, self.num_slots)
        state = self._states[lane][-1]
        arguments = reset_arguments(of_lane, token_ids, num_prompt, self._max_model_len)
        self._states[lane][-1] = state._replace(counts=self._programs["decode/reset"](state.counts, *arguments))

    def put(self, rows: SamplingRows) -> SamplingRows:
        """Sampling parameters on the devices that sample, for all the steps that share them."""
        return place(rows, replicated(self._last.mesh))

    def run(self, batch: DecodeBatch, rows: SamplingRows, lane: int = 0) -> Sampled:
        """Start one step of a lane, on every stage; returns arrays that the last one's devices are yet to fill."""
        states, handed = self._states[lane], self._newest[lane]
        found: Any = None
        launched_at = self._clock.now() if self._clock is not None else 0.0
        for number, (stage, weights) in enumerate(zip(self._stages, self._weights, strict=True)):
            program = self._programs[program_name(f"decode/{len(batch.slots)}", self._stages, number)]
            sampling = rows if stage is self._last else None
            stage.pool.array, states[number], found, self.loads.counts[number] = program(
                weights, stage.pool.array, states[number], batch, sampling, self.loads.counts[number], *handed
            )
            if self._clock is not None:
                array = found.packed if stage is self._last else found
                self._ended[lane] = self._clock.launched(number, launched_at, array, self._ended[lane])
            if stage is not self._last:
                handed = (pass_on(found, self._stages[number + 1]),)
        self._hand_tokens(lane)
        sampled: Sampled = found
        if self._is_on_accelerator:  # else the host reads them where they are
            sampled.packed.copy_to_host_async()
        return sampled

    def _hand_tokens(self, lane: int) -> None:
        """On to the first stage, for the lane's next step; where that is the last too they are there."""
        if len(self._stages) > 1:
            tokens = self._states[lane][-1].tokens
            assert tokens is not None
            self._newest[lane] = (pass_on(tokens, self._first),)


def _xla_options(num_rows: int, mesh: Mesh, form: MatrixFormat) -> dict[str, str]:
    return _EIGEN_OPTIONS if is_cpu(mesh) and form == _XLA_FLOAT32 and num_rows in _EIGEN_ROWS else {}
