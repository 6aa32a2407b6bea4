"""DecodeRunner: the decode mesh's arrays and compiled programs; one call a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxinfer.decode.batch import DecodeBatch, empty_batch
from jaxinfer.decode.program import assign_slot, decode_step, forward_step, sample_step
from jaxinfer.decode.state import DecodeState, abstract_state, empty_state
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.pipeline.expert_loads import ExpertLoads
from jaxinfer.pipeline.stage import Stage, StagedWeights, abstract_hidden, pass_on, program_name
from jaxinfer.pipeline.stage_clock import Ended, StageClock
from jaxinfer.programs.compilation import Executable, ProgramSource, abstract_like, options_of_sampling
from jaxinfer.sampling.params import SamplingRows, are_greedy, neutral_rows
from jaxinfer.sampling.sampler import Sampled
from jaxinfer.sampling.token_counts import reset_arguments, reset_program
from jaxinfer.weights.formats.plain import Plain
from jaxinfer.weights.formats.weight_format import ModelWeightFormat
from jaxinfer.weights.template import Weights
from sharding.mesh import is_cpu
from sharding.partition import place, replicated

# On CPU, XLA's matrix products use YNNPACK, which for 2 to 16 rows of float32 is 15 to 25% slower than Eigen. Only for
# these it is switched off.
_EIGEN_ROWS = range(2, 17)
_XLA_FLOAT32 = ModelWeightFormat(Plain(np.dtype("float32")))
_EIGEN_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


class DecodeRunner:
    """With pipeline stages, as many steps are in flight as there are stages, so that none waits. The batch is split
    into as many micro-batches, each with its own slots. `assign_slot` and `count_tokens` number the slots of all
    micro-batches consecutively; a step's batch numbers those of its micro-batch from 0."""

    def __init__(self, stages: Sequence[Stage], buckets: tuple[int, ...], max_model_len: int, clock: StageClock | None = None) -> None:
        """`clock`: gets the steps of pipeline stages."""
        self._stages, self._clock = tuple(stages), clock
        self._first, self._last = self._stages[0], self._stages[-1]
        self.loads = ExpertLoads(stages)
        # In programs that the host chooses between: see `sampler._where_asked`.
        self._samples_apart = self._last.mesh.size > 1
        self._is_on_accelerator = not is_cpu(self._last.mesh)
        self._max_model_len = max_model_len
        self.buckets = buckets
        self.num_micro_batches = len(stages)
        self.num_slots = buckets[-1]  # of a micro-batch
        spec = stages[0].pool.spec
        self.num_groups = spec.num_groups
        self.table_width = spec.blocks_for(max_model_len) * self.num_groups
        self._abstract = [abstract_state(s, self.num_slots, self.table_width, is_last=s is self._last) for s in self._stages]
        self._programs: dict[str, Executable] = {}
        self._weights: StagedWeights = ()
        self._head_weights: Weights = ()
        self._states: list[list[DecodeState]] = []  # by micro-batch, then stage
        self._ended: list[Ended | None] = [None] * self.num_micro_batches  # of each one's last step, on the last stage
        self._newest: list[Int[Array, " S+1"]] = []  # each micro-batch's last tokens, sent to the first stage

    def programs(self, buckets: tuple[int, ...] | None = None) -> list[ProgramSource]:
        """The programs to compile: decode, one a bucket and stage; two that sample, one pair a bucket, if the last
        stage has several devices; for joining sequences, those that set page tables and count tokens for penalties.
        `buckets`: those of some, by default of all."""
        buckets = self.buckets if buckets is None else buckets
        sources = []
        for number, stage in enumerate(self._stages):
            on_mesh, template, state = replicated(stage.mesh), stage.template, self._abstract[number]
            weights, samples = template.abstract(stage.mesh, stage.rules), stage is self._last and not self._samples_apart
            step = (decode_step if samples else forward_step)(template, stage.mesh, stage.attention)
            for size in buckets:
                batch = abstract_like(empty_batch(size, self.num_slots, self.num_groups), on_mesh)
                pool = stage.pool
                arguments = [
                    weights,
                    pool.abstract,
                    pool.abstract_scales,
                    state if samples else state.of_layers,
                    batch,
                    self.loads.abstract[number],
                ]
                if samples:
                    arguments.append(abstract_like(neutral_rows(size), on_mesh))
                if not template.is_first:
                    arguments.append(abstract_hidden(stage, size))
                elif not samples:
                    arguments.append(jax.ShapeDtypeStruct((self.num_slots + 1,), np.int32, sharding=on_mesh))
                name, options = program_name(f"decode/{size}", self._stages, number), _xla_options(size, stage.mesh, template.weight_format)
                sources.append(ProgramSource(name, step, tuple(arguments), stage.mesh, donated=(1, 3), options=options))
            slot_arguments = abstract_like(self._slot_arguments(0, ()), on_mesh)
            name = program_name("decode/assign_slot", self._stages, number)
            sources.append(ProgramSource(name, assign_slot, (state.page_table, *slot_arguments), stage.mesh, donated=(0,)))
        if self._samples_apart:
            sources += [program for size in buckets for program in self._programs_of_head(size)]
        counts = self._abstract[-1].counts
        assert counts is not None
        return [*sources, reset_program("decode/reset", counts, self._max_model_len, self._last.mesh)]

    def _programs_of_head(self, size: int) -> list[ProgramSource]:
        stage, head, state = self._last, self._last.template.head, self._abstract[-1]
        on_mesh = replicated(stage.mesh)
        hidden = jax.ShapeDtypeStruct((size, head.config.hidden_size), head.activation_dtype, sharding=on_mesh)
        rows = jax.ShapeDtypeStruct((size, 3), np.int32, sharding=on_mesh)
        known = (head.abstract(stage.mesh, stage.rules), hidden, rows)
        greedy, sample = (*known, state.of_best_token), (*known, state.of_sampling, abstract_like(neutral_rows(size), on_mesh))
        options = _xla_options(size, stage.mesh, head.weight_format) | options_of_sampling(stage.mesh)
        return [
            ProgramSource(self._of_last(f"decode/{name}/{size}"), sample_step(head), arguments, stage.mesh, donated=(3,), options=options)
            for name, arguments in (("greedy", greedy), ("sample", sample))
        ]

    def _of_last(self, name: str) -> str:
        return program_name(name, self._stages, len(self._stages) - 1)

    def start(self, programs: dict[str, Executable], weights: StagedWeights) -> None:
        """Set the compiled programs and the weights; allocate the decode states."""
        self._programs = programs
        self.set_weights(weights)
        self.loads.reset()
        self._states = [list(map(empty_state, self._abstract)) for _ in range(self.num_micro_batches)]
        self._newest = [self._to_first(states[-1].tokens) for states in self._states]

    def add_bucket(self, size: int, programs: dict[str, Executable]) -> None:
        """Use these programs from now on."""
        self._programs |= programs
        self.buckets = tuple(sorted({*self.buckets, size}))

    def set_weights(self, weights: StagedWeights) -> None:
        """The weights of later steps; empty while there are none."""
        self._weights = weights
        self._head_weights = self._last.template.head_weights(weights[-1]) if weights else ()

    def assign_slot(self, slot: int, page_ids: Sequence[int]) -> None:
        """Set the page table of a slot."""
        micro_batch, local_slot = divmod(slot, self.num_slots)
        states = self._states[micro_batch]
        for number, state in enumerate(states):
            program = self._programs[program_name("decode/assign_slot", self._stages, number)]
            states[number] = state._replace(page_table=program(state.page_table, *self._slot_arguments(local_slot, page_ids)))

    def _slot_arguments(self, slot: int, page_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        row = np.full(self.table_width, NULL_PAGE, np.int32)
        row[: len(page_ids)] = page_ids
        return np.asarray(slot, np.int32), row

    def count_tokens(self, slot: int, token_ids: Sequence[int], num_prompt: int) -> None:
        """Count a sequence's tokens for the penalties of a slot."""
        micro_batch, local_slot = divmod(slot, self.num_slots)
        states, arguments = self._states[micro_batch], reset_arguments(local_slot, token_ids, num_prompt, self._max_model_len)
        states[-1] = states[-1]._replace(counts=self._programs["decode/reset"](states[-1].counts, *arguments))

    def put(self, rows: SamplingRows, num_generated: Int[Any, " B"]) -> SamplingRows | None:
        """Sampling parameters on the last stage's devices, for all steps that share them. None if the host chooses
        between programs and all rows are greedy."""
        return None if self._samples_apart and are_greedy(rows, num_generated) else place(rows, replicated(self._last.mesh))

    def run(self, batch: DecodeBatch, rows: SamplingRows | None, micro_batch: int = 0) -> Sampled:
        """Start one step of a micro-batch, on every stage. Returns arrays that the last stage has yet to compute.
        `rows`: from `put`."""
        states, handed = self._states[micro_batch], self._newest[micro_batch]
        found: Array
        launched_at = self._clock.now() if self._clock is not None else 0.0
        for number, (stage, weights) in enumerate(zip(self._stages, self._weights, strict=True)):
            program = self._programs[program_name(f"decode/{len(batch.slots)}", self._stages, number)]
            state, loads = states[number], self.loads.counts[number]
            if stage is self._last and not self._samples_apart:
                hidden = () if stage is self._first else (handed,)
                stage.pool.array, states[number], sampled, self.loads.counts[number] = program(
                    weights, stage.pool.array, stage.pool.scales, state, batch, loads, rows, *hidden
                )
                found = sampled.packed
            else:
                stage.pool.array, changed, found, of_rows, self.loads.counts[number] = program(
                    weights, stage.pool.array, stage.pool.scales, state.of_layers, batch, loads, handed
                )
                states[number] = state._replace(page_table=changed.page_table)
                if stage is self._last:
                    sampled = self._sample(states, found, of_rows, rows)
                    found = sampled.packed
            if self._clock is not None:
                self._ended[micro_batch] = self._clock.launched(number, launched_at, found, self._ended[micro_batch])
            if stage is not self._last:
                handed = pass_on(found, self._stages[number + 1])
        self._newest[micro_batch] = self._to_first(states[-1].tokens)
        if self._is_on_accelerator:  # on CPU the host reads the array in place
            sampled.packed.copy_to_host_async()
        return sampled

    def _sample(self, states: list[DecodeState], hidden: Array, of_rows: Array, rows: SamplingRows | None) -> Sampled:
        """Sample with the program that the host chooses; replaces the last of a micro-batch's `states`."""
        state = states[-1]
        sampled: Sampled
        if rows is None:
            program = self._programs[self._of_last(f"decode/greedy/{len(hidden)}")]
            changed, sampled = program(self._head_weights, hidden, of_rows, state.of_best_token)
            states[-1] = state._replace(tokens=changed.tokens)
        else:
            program = self._programs[self._of_last(f"decode/sample/{len(hidden)}")]
            changed, sampled = program(self._head_weights, hidden, of_rows, state.of_sampling, rows)
            states[-1] = state._replace(tokens=changed.tokens, counts=changed.counts)
        return sampled

    def _to_first(self, tokens: Int[Array, " S+1"] | None) -> Int[Array, " S+1"]:
        """Send tokens to the first stage; without a pipeline they are there."""
        assert tokens is not None
        return tokens if len(self._stages) == 1 else pass_on(tokens, self._first)


def _xla_options(num_rows: int, mesh: Mesh, weight_format: ModelWeightFormat) -> dict[str, str]:
    return _EIGEN_OPTIONS if is_cpu(mesh) and weight_format == _XLA_FLOAT32 and num_rows in _EIGEN_ROWS else {}
