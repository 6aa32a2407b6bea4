"""DecodeRunner: the decode mesh's arrays and compiled programs; one call a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32

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


class LaunchedForward(NamedTuple):
    """A step whose sampling was not started yet."""

    hidden: Float[Array, "B D"]
    rows: Int[Array, "B 3"]  # from `forward_step`
    micro_batch: int
    launched_at: float  # seconds, of the stages' clock


class DecodeRunner:
    """With pipeline stages, as many steps are in flight as there are stages, so that none waits. The batch is split
    into as many micro-batches, each with its own slots. `assign_slot` and `count_tokens` number the slots of all
    micro-batches consecutively; a step's batch numbers those of its micro-batch from 0."""

    def __init__(
        self, stages: Sequence[Stage], buckets: tuple[int, ...], max_model_len: int, clock: StageClock | None = None, mask_words: int = 0
    ) -> None:
        """`clock`: gets the steps of pipeline stages. `mask_words`: 32-bit words of a row's mask."""
        self._stages, self._clock, self.mask_words = tuple(stages), clock, mask_words
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
            samples = stage is self._last and not self._samples_apart
            sources += [self._whole_step(size) if samples else self._forward_step(number, size) for size in buckets]
            slot_arguments = abstract_like(self._slot_arguments(0, ()), replicated(stage.mesh))
            name, table = program_name("decode/assign_slot", self._stages, number), self._abstract[number].page_table
            sources.append(ProgramSource(name, assign_slot, (table, *slot_arguments), stage.mesh, donated=(0,)))
        if self._samples_apart:
            sources += [self._sampling_step(name, size) for size in buckets for name in ("greedy", "sample")]
        counts = self._abstract[-1].counts
        assert counts is not None
        return [*sources, reset_program("decode/reset", counts, self._max_model_len, self._last.mesh)]

    def masked_programs(self, buckets: tuple[int, ...]) -> list[ProgramSource]:
        """Those of steps that sample with masks, beside `programs`."""
        forward = [] if self._samples_apart else [self._forward_step(len(self._stages) - 1, size) for size in buckets]
        return forward + [self._sampling_step("masked", size) for size in buckets]

    def _whole_step(self, size: int) -> ProgramSource:
        """Of the last stage: the forward pass and sampling."""
        stage, number = self._last, len(self._stages) - 1
        known, batch, hidden, options = self._arguments(number, size)
        rows = abstract_like(neutral_rows(size), replicated(stage.mesh))
        arguments = (*known, self._abstract[-1], batch, self.loads.abstract[number], rows, *(() if stage is self._first else (hidden,)))
        step = decode_step(stage.template, stage.mesh, stage.attention)
        return ProgramSource(self._of_last(f"decode/{size}"), step, arguments, stage.mesh, donated=(1, 3), options=options)

    def _forward_step(self, number: int, size: int) -> ProgramSource:
        stage = self._stages[number]
        known, batch, handed, options = self._arguments(number, size)
        arguments = (*known, self._abstract[number].of_layers, batch, self.loads.abstract[number], handed)
        name, step = self._name_of_forward(size, number), forward_step(stage.template, stage.mesh, stage.attention)
        return ProgramSource(name, step, arguments, stage.mesh, donated=(1, 3), options=options)

    def _arguments(self, number: int, size: int) -> tuple[tuple[Any, ...], Any, Any, dict[str, str]]:
        """Of a stage's steps: weights and pages, the batch, what the stage before hands on; and XLA's options."""
        stage, on_mesh = self._stages[number], replicated(self._stages[number].mesh)
        known = stage.template.abstract(stage.mesh, stage.rules), stage.pool.abstract, stage.pool.abstract_scales
        batch = abstract_like(empty_batch(size, self.num_slots, self.num_groups), on_mesh)
        tokens = jax.ShapeDtypeStruct((self.num_slots + 1,), np.int32, sharding=on_mesh)
        handed = tokens if stage.template.is_first else abstract_hidden(stage, size)
        return known, batch, handed, _xla_options(size, stage.mesh, stage.template.weight_format)

    def _sampling_step(self, name: str, size: int) -> ProgramSource:
        """`name`: greedy, sample or masked."""
        stage, head, state = self._last, self._last.template.head, self._abstract[-1]
        on_mesh = replicated(stage.mesh)
        hidden = jax.ShapeDtypeStruct((size, head.config.hidden_size), head.activation_dtype, sharding=on_mesh)
        rows = jax.ShapeDtypeStruct((size, 3), np.int32, sharding=on_mesh)
        arguments: tuple[Any, ...] = (head.abstract(stage.mesh, stage.rules), hidden, rows)
        if name == "greedy":
            arguments += (state.of_best_token,)
        else:
            arguments += (state.of_sampling, abstract_like(neutral_rows(size), on_mesh))
        if name == "masked":
            arguments += (jax.ShapeDtypeStruct((size, self.mask_words), np.int32, sharding=on_mesh),)
        options = _xla_options(size, stage.mesh, head.weight_format) | options_of_sampling(stage.mesh)
        return ProgramSource(
            self._of_last(f"decode/{name}/{size}"), sample_step(head), arguments, stage.mesh, donated=(3,), options=options
        )

    def _name_of_forward(self, size: int, number: int) -> str:
        """The name of a stage's program that doesn't sample."""
        is_whole = self._samples_apart or self._stages[number] is not self._last
        return program_name(f"decode/{size}" if is_whole else f"decode/forward/{size}", self._stages, number)

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

    def add_programs(self, programs: dict[str, Executable]) -> None:
        """Use these too from now on."""
        self._programs |= programs

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

    def put(self, rows: SamplingRows, num_generated: Int[Any, " B"], *, has_masks: bool = False) -> SamplingRows | None:
        """Sampling parameters on the last stage's devices, for all steps that share them. None if the host chooses
        between programs and all rows are greedy without masks."""
        is_greedy = self._samples_apart and not has_masks and are_greedy(rows, num_generated)
        return None if is_greedy else place(rows, replicated(self._last.mesh))

    def run(self, batch: DecodeBatch, rows: SamplingRows | None, micro_batch: int = 0) -> Sampled:
        """Start one step of a micro-batch, on every stage. Returns arrays that the last stage has yet to compute.
        `rows`: from `put`."""
        if self._samples_apart:
            return self.sample(self.forward(batch, micro_batch), rows)
        launched_at, handed = self._through_stages(batch, micro_batch, self._stages[:-1])
        number, stage, states = len(self._stages) - 1, self._last, self._states[micro_batch]
        program = self._programs[self._of_last(f"decode/{len(batch.slots)}")]
        hidden = () if stage is self._first else (handed,)
        sampled: Sampled
        stage.pool.array, states[number], sampled, self.loads.counts[number] = program(
            self._weights[number], stage.pool.array, stage.pool.scales, states[number], batch, self.loads.counts[number], rows, *hidden
        )
        self._has_launched(number, launched_at, sampled.packed, micro_batch)
        return self._sent(sampled, micro_batch)

    def forward(self, batch: DecodeBatch, micro_batch: int = 0) -> LaunchedForward:
        """Start one step of a micro-batch without its sampling, which `sample` starts."""
        launched_at, found = self._through_stages(batch, micro_batch, self._stages)
        return LaunchedForward(found[0], found[1], micro_batch, launched_at)

    def sample(self, step: LaunchedForward, rows: SamplingRows | None, masks: Int32[np.ndarray, "B W"] | None = None) -> Sampled:
        """Start the sampling of a step, with the program that the host chooses. `rows`: from `put`; `masks`: see
        `structured.grammars.masks_for`."""
        states, state, hidden = self._states[step.micro_batch], self._states[step.micro_batch][-1], step.hidden
        known = self._head_weights, hidden, step.rows
        sampled: Sampled
        if rows is None:
            changed, sampled = self._programs[self._of_last(f"decode/greedy/{len(hidden)}")](*known, state.of_best_token)
            states[-1] = state._replace(tokens=changed.tokens)
        elif masks is None:
            changed, sampled = self._programs[self._of_last(f"decode/sample/{len(hidden)}")](*known, state.of_sampling, rows)
            states[-1] = state._replace(tokens=changed.tokens, counts=changed.counts)
        else:
            changed, sampled = self._programs[self._of_last(f"decode/masked/{len(hidden)}")](*known, state.of_sampling, rows, masks)
            states[-1] = state._replace(tokens=changed.tokens, counts=changed.counts)
        self._has_launched(len(self._stages) - 1, step.launched_at, sampled.packed, step.micro_batch)
        return self._sent(sampled, step.micro_batch)

    def _through_stages(self, batch: DecodeBatch, micro_batch: int, stages: Sequence[Stage]) -> tuple[float, Any]:
        """Start the forward pass on the first stages, or on all; when, and what comes out."""
        states, handed = self._states[micro_batch], self._newest[micro_batch]
        launched_at = self._clock.now() if self._clock is not None else 0.0
        for number, stage in enumerate(stages):
            program = self._programs[self._name_of_forward(len(batch.slots), number)]
            stage.pool.array, changed, found, of_rows, self.loads.counts[number] = program(
                self._weights[number],
                stage.pool.array,
                stage.pool.scales,
                states[number].of_layers,
                batch,
                self.loads.counts[number],
                handed,
            )
            states[number] = states[number]._replace(page_table=changed.page_table)
            if stage is self._last:
                return launched_at, (found, of_rows)
            self._has_launched(number, launched_at, found, micro_batch)
            handed = pass_on(found, self._stages[number + 1])
        return launched_at, handed

    def _has_launched(self, number: int, at: float, array: Array, micro_batch: int) -> None:
        if self._clock is not None:
            self._ended[micro_batch] = self._clock.launched(number, at, array, self._ended[micro_batch])

    def _sent(self, sampled: Sampled, micro_batch: int) -> Sampled:
        """On its way to the host; its tokens to the first stage."""
        self._newest[micro_batch] = self._to_first(self._states[micro_batch][-1].tokens)
        if self._is_on_accelerator:  # on CPU the host reads the array in place
            sampled.packed.copy_to_host_async()
        return sampled

    def _to_first(self, tokens: Int[Array, " S+1"] | None) -> Int[Array, " S+1"]:
        """Send tokens to the first stage; without a pipeline they are there."""
        assert tokens is not None
        return tokens if len(self._stages) == 1 else pass_on(tokens, self._first)


def _xla_options(num_rows: int, mesh: Mesh, weight_format: ModelWeightFormat) -> dict[str, str]:
    return _EIGEN_OPTIONS if is_cpu(mesh) and weight_format == _XLA_FLOAT32 and num_rows in _EIGEN_ROWS else {}
