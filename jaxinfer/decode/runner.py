"""DecodeRunner: the decode mesh's arrays and compiled programs, and one call a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxinfer.decode.batch import DecodeBatch, empty_batch
from jaxinfer.decode.program import assign_slot, decode_step, forward_step, greedy_step, sample_step
from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.layers.matrices import MatrixFormat
from jaxinfer.runtime.compilation import Executable, ProgramSource, abstract_like, options_of_sampling
from jaxinfer.runtime.expert_loads import ExpertLoads
from jaxinfer.runtime.stage import Stage, StagedWeights, abstract_hidden, pass_on, program_name
from jaxinfer.runtime.stage_clock import Ended, StageClock
from jaxinfer.runtime.template import Weights
from jaxinfer.sampling.params import SamplingRows, are_greedy, neutral_rows
from jaxinfer.sampling.sampler import Sampled
from jaxinfer.sampling.token_counts import TokenCounts, abstract_counts, reset_arguments, reset_program
from sharding.mesh import is_cpu
from sharding.partition import place, replicated

# On a CPU XLA takes matrix products from YNNPACK, which for 2 to 16 rows of float32 is 15 to 25% slower than Eigen; without it only for these.
_EIGEN_ROWS = range(2, 17)
_XLA_FLOAT32 = MatrixFormat(np.dtype("float32"))
_EIGEN_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


class DecodeRunner:
    """With several stages as many steps are under way, so that none waits for another: the batch is cut into as many lanes, each with slots of its
    own. `assign_slot` and `count_tokens` number the slots of all lanes through; a step's batch numbers those of its lane from 0."""

    def __init__(self, stages: Sequence[Stage], buckets: tuple[int, ...], max_model_len: int, clock: StageClock | None = None) -> None:
        """`clock`: is told of the steps, where there are several stages."""
        self._stages, self._clock = tuple(stages), clock
        self._first, self._last = self._stages[0], self._stages[-1]
        self.loads = ExpertLoads(stages)
        self._samples_apart = self._last.mesh.size > 1  # in programs that the host chooses between: see `sampler._where_asked`
        self._is_on_accelerator = not is_cpu(self._last.mesh)
        self._max_model_len = max_model_len
        self.buckets = buckets
        self.num_lanes = len(stages)
        self.num_slots = buckets[-1]  # of a lane
        spec = stages[0].pool.spec
        self.num_groups = spec.num_groups
        self.table_width = spec.blocks_for(max_model_len) * self.num_groups
        self._abstract_counts = abstract_counts(
            self.num_slots + 1, self._last.template.config.vocab_size, self._last.mesh, self._last.rules
        )
        self._programs: dict[str, Executable] = {}
        self._weights: StagedWeights = ()
        self._head_weights: Weights = ()
        self._page_tables: list[list[Int[Array, "S+1 W"]]] = []  # of each lane and stage
        self._tokens: list[Int[Array, " S+1"]] = []  # of each lane, that were sampled last; on the last stage, as the next
        self._counts: list[TokenCounts] = []
        self._ended: list[Ended | None] = [None] * self.num_lanes  # each lane's last step, on the last stage
        self._newest: list[Int[Array, " S+1"]] = []  # the tokens too, on their way from the last stage to the first

    def _abstract_table(self, stage: Stage) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_slots + 1, self.table_width), np.int32, sharding=replicated(stage.mesh))

    def _abstract_tokens(self, stage: Stage) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_slots + 1,), np.int32, sharding=replicated(stage.mesh))

    def programs(self) -> list[ProgramSource]:
        """What to compile: a decode program a bucket and stage; where the last stage has several devices two more a bucket, that sample; and for
        sequences that join the ones that take their page tables and, for penalties, count their tokens."""
        sources = []
        for number, stage in enumerate(self._stages):
            on_mesh, template, table = replicated(stage.mesh), stage.template, self._abstract_table(stage)
            weights, samples = template.abstract(stage.mesh, stage.rules), stage is self._last and not self._samples_apart
            step = (decode_step if samples else forward_step)(template, stage.mesh, stage.attention)
            for size in self.buckets:
                batch = abstract_like(empty_batch(size, self.num_slots, self.num_groups), on_mesh)
                arguments = [weights, stage.pool.abstract, table, batch, self.loads.abstract[number]]
                if samples:
                    arguments += [self._abstract_tokens(stage), self._abstract_counts, abstract_like(neutral_rows(size), on_mesh)]
                if not (samples and template.is_first):
                    arguments.append(self._abstract_tokens(stage) if template.is_first else abstract_hidden(stage, size))
                name, options = program_name(f"decode/{size}", self._stages, number), _xla_options(size, stage.mesh, template.form)
                donated = (1, 2, 5, 6) if samples else (1, 2)
                sources.append(ProgramSource(name, step, tuple(arguments), stage.mesh, donated, options))
            slot_arguments = abstract_like(self._slot_arguments(0, ()), on_mesh)
            name = program_name("decode/assign_slot", self._stages, number)
            sources.append(ProgramSource(name, assign_slot, (table, *slot_arguments), stage.mesh, donated=(0,)))
        if self._samples_apart:
            sources += [program for size in self.buckets for program in self._programs_of_head(size)]
        return [*sources, reset_program("decode/reset", self._abstract_counts, self._max_model_len, self._last.mesh)]

    def _programs_of_head(self, size: int) -> list[ProgramSource]:
        stage, head = self._last, self._last.template.head
        on_mesh, tokens = replicated(stage.mesh), self._abstract_tokens(stage)
        hidden = jax.ShapeDtypeStruct((size, head.config.hidden_size), head.activation_dtype, sharding=on_mesh)
        rows = jax.ShapeDtypeStruct((size, 3), np.int32, sharding=on_mesh)
        greedy = (head.abstract(stage.mesh, stage.rules), hidden, rows, tokens)
        sample = (*greedy, self._abstract_counts, abstract_like(neutral_rows(size), on_mesh))
        options = _xla_options(size, stage.mesh, head.form) | options_of_sampling(stage.mesh)
        return [
            ProgramSource(self._of_last(f"decode/greedy/{size}"), greedy_step(head), greedy, stage.mesh, donated=(3,), options=options),
            ProgramSource(self._of_last(f"decode/sample/{size}"), sample_step(head), sample, stage.mesh, donated=(3, 4), options=options),
        ]

    def _of_last(self, name: str) -> str:
        return program_name(name, self._stages, len(self._stages) - 1)

    def start(self, programs: dict[str, Executable], weights: StagedWeights) -> None:
        """Take the compiled programs and the weights; allocate what else stays on the devices."""
        self._programs, self._weights = programs, weights
        self._head_weights = self._last.template.head_weights(weights[-1])
        self.loads.reset()

        def empty(abstract: Any) -> Any:
            return jax.tree.map(lambda a: place(np.zeros(a.shape, a.dtype), a.sharding), abstract)

        lanes = range(self.num_lanes)
        self._page_tables = [[empty(self._abstract_table(stage)) for stage in self._stages] for _ in lanes]
        self._tokens = [empty(self._abstract_tokens(self._last)) for _ in lanes]
        self._counts = [empty(self._abstract_counts) for _ in lanes]
        self._newest = list(map(self._to_first, self._tokens))

    def assign_slot(self, slot: int, page_ids: Sequence[int]) -> None:
        """Make a sequence's page table known to a slot."""
        lane, of_lane = divmod(slot, self.num_slots)
        tables = self._page_tables[lane]
        for number, table in enumerate(tables):
            program = self._programs[program_name("decode/assign_slot", self._stages, number)]
            tables[number] = program(table, *self._slot_arguments(of_lane, page_ids))

    def _slot_arguments(self, slot: int, page_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        row = np.full(self.table_width, NULL_PAGE, np.int32)
        row[: len(page_ids)] = page_ids
        return np.asarray(slot, np.int32), row

    def count_tokens(self, slot: int, token_ids: Sequence[int], num_prompt: int) -> None:
        """Make a sequence's tokens known to the penalties of a slot."""
        lane, of_lane = divmod(slot, self.num_slots)
        arguments = reset_arguments(of_lane, token_ids, num_prompt, self._max_model_len)
        self._counts[lane] = self._programs["decode/reset"](self._counts[lane], *arguments)

    def put(self, rows: SamplingRows, num_generated: Int[Any, " B"]) -> SamplingRows | None:
        """Sampling parameters on the devices that sample, for all the steps that share them. None where the host decides between two programs and all
        rows take their best tokens."""
        return None if self._samples_apart and are_greedy(rows, num_generated) else place(rows, replicated(self._last.mesh))

    def run(self, batch: DecodeBatch, rows: SamplingRows | None, lane: int = 0) -> Sampled:
        """Start one step of a lane, on every stage; returns arrays that the last one's devices are yet to fill. `rows` are what `put` gave."""
        tables, handed = self._page_tables[lane], self._newest[lane]
        found: Array
        launched_at = self._clock.now() if self._clock is not None else 0.0
        for number, (stage, weights) in enumerate(zip(self._stages, self._weights, strict=True)):
            program = self._programs[program_name(f"decode/{len(batch.slots)}", self._stages, number)]
            arguments = weights, stage.pool.array, tables[number], batch, self.loads.counts[number]
            if stage is self._last and not self._samples_apart:
                stage.pool.array, tables[number], self._tokens[lane], self._counts[lane], sampled, self.loads.counts[number] = program(
                    *arguments, self._tokens[lane], self._counts[lane], rows, *(() if stage is self._first else (handed,))
                )
                found = sampled.packed
            else:
                stage.pool.array, tables[number], found, of_rows, self.loads.counts[number] = program(*arguments, handed)
                if stage is self._last:
                    sampled = self._sample(lane, found, of_rows, rows)
                    found = sampled.packed
            if self._clock is not None:
                self._ended[lane] = self._clock.launched(number, launched_at, found, self._ended[lane])
            if stage is not self._last:
                handed = pass_on(found, self._stages[number + 1])
        self._newest[lane] = self._to_first(self._tokens[lane])
        if self._is_on_accelerator:  # else the host reads them where they are
            sampled.packed.copy_to_host_async()
        return sampled

    def _sample(self, lane: int, hidden: Array, of_rows: Array, rows: SamplingRows | None) -> Sampled:
        arguments = self._head_weights, hidden, of_rows, self._tokens[lane]
        sampled: Sampled
        if rows is None:
            program = self._programs[self._of_last(f"decode/greedy/{len(hidden)}")]
            self._tokens[lane], sampled = program(*arguments)
        else:
            program = self._programs[self._of_last(f"decode/sample/{len(hidden)}")]
            self._tokens[lane], self._counts[lane], sampled = program(*arguments, self._counts[lane], rows)
        return sampled

    def _to_first(self, tokens: Int[Array, " S+1"]) -> Int[Array, " S+1"]:
        """Where that is the last stage too they are there."""
        return tokens if len(self._stages) == 1 else pass_on(tokens, self._first)


def _xla_options(num_rows: int, mesh: Mesh, form: MatrixFormat) -> dict[str, str]:
    return _EIGEN_OPTIONS if is_cpu(mesh) and form == _XLA_FLOAT32 and num_rows in _EIGEN_ROWS else {}
