"""PrefillRunner: the prefill mesh's arrays and compiled programs; one call a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxinfer.kv_cache.spec import NULL_PAGE
from jaxinfer.pipeline.expert_loads import ExpertLoads
from jaxinfer.pipeline.stage import Stage, StagedWeights, abstract_hidden, pass_on, program_name, splits_tokens_of
from jaxinfer.pipeline.stage_clock import Ended, StageClock
from jaxinfer.prefill.batch import PrefillBatch, empty_batch
from jaxinfer.prefill.program import PromptScores, copy_pages, prefill_step, repeat_step, sample_step, score_step
from jaxinfer.programs.buckets import prefill_rows
from jaxinfer.programs.compilation import Executable, ProgramSource, abstract_like, options_of_sampling
from jaxinfer.sampling.params import SamplingRows, are_greedy, neutral_rows
from jaxinfer.sampling.sampler import Sampled
from jaxinfer.sampling.token_counts import TokenCounts, abstract_counts, reset_arguments, reset_program
from jaxinfer.structured.grammars import Grammar, masks_for
from jaxinfer.weights.template import Weights
from sharding.partition import place, replicated

logger = logging.getLogger(__name__)


class PrefillResult(NamedTuple):
    sampled: Sampled
    prompt_scores: PromptScores | None  # where the batch asked for them
    last_hidden: Float[Any, "R D"]  # for each row's last token; stays on the device


class PrefillRunner:
    def __init__(
        self, stages: Sequence[Stage], buckets: tuple[int, ...], max_model_len: int, clock: StageClock | None = None, mask_words: int = 0
    ) -> None:
        """`clock`: gets the steps of pipeline stages. `mask_words`: 32-bit words of a row's mask."""
        self._stages, self._clock, self.mask_words = tuple(stages), clock, mask_words
        self.loads = ExpertLoads(stages)
        self.max_model_len = max_model_len
        self.buckets = buckets
        spec = stages[0].pool.spec
        self.table_width = spec.blocks_for(max_model_len) * spec.num_groups
        self._last = last = self._stages[-1]
        self.num_rows = prefill_rows(buckets[-1])  # of the largest program; also the most forks that start at once
        self._abstract_counts = abstract_counts(self.num_rows, last.template.config.vocab_size, last.mesh, last.rules)
        self._programs: dict[str, Executable] = {}
        self._weights: StagedWeights = ()
        self._head_weights: Weights = ()
        self._counts: TokenCounts | None = None

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def programs(self, buckets: tuple[int, ...] | None = None) -> list[ProgramSource]:
        """The programs to compile: prefill, one a bucket and stage; on the last stage two that sample first tokens for
        each number of rows, one a bucket that scores prompts, those that fork a prompt, and the one that counts tokens
        for penalties. `buckets`: those of some, by default of all."""
        buckets = self.buckets if buckets is None else buckets
        batches = {size: empty_batch(size, prefill_rows(size), self.table_width).packed for size in buckets}
        sources = []
        for number, stage in enumerate(self._stages):
            weights = stage.template.abstract(stage.mesh, stage.rules)
            for size, batch in batches.items():
                splits_tokens = splits_tokens_of(stage, size)
                step = prefill_step(stage.template, stage.mesh, stage.attention, splits_tokens=splits_tokens)
                loads = self.loads.abstract[number]
                arguments = (weights, stage.pool.abstract, stage.pool.abstract_scales, abstract_like(batch, replicated(stage.mesh)), loads)
                hidden = abstract_hidden(stage, size)
                name = program_name(f"prefill/{size}", self._stages, number)
                if splits_tokens:
                    logger.info("%s: sequence parallel over %d devices", name, stage.mesh.size)
                sources.append(ProgramSource(name, step, arguments if hidden is None else (*arguments, hidden), stage.mesh, donated=(1,)))
            ids = abstract_like(self._padded(()), replicated(stage.mesh))
            copy = program_name("prefill/copy", self._stages, number)
            sources.append(ProgramSource(copy, copy_pages, (stage.pool.abstract, ids, ids), stage.mesh, donated=(0,)))
        reset = reset_program("prefill/reset", self._abstract_counts, self.max_model_len, self._last.mesh)
        return [*sources, *self._programs_of_head(buckets), reset]

    def _programs_of_head(self, buckets: tuple[int, ...]) -> list[ProgramSource]:
        stage, head = self._last, self._last.template.head
        on_mesh, weights = replicated(stage.mesh), head.abstract(stage.mesh, stage.rules)

        def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=on_mesh)

        def hidden(num_tokens: int) -> jax.ShapeDtypeStruct:
            return abstract((num_tokens, head.config.hidden_size), head.activation_dtype)

        sources = []
        for rows in sorted({prefill_rows(size) for size in buckets}):
            asked = abstract((rows,), np.int32), abstract_like(neutral_rows(rows), on_mesh)
            sampling, options = (weights, hidden(rows), self._abstract_counts, *asked), options_of_sampling(stage.mesh)
            sources += [
                ProgramSource(self._of_last(f"prefill/greedy/{rows}"), sample_step(head), (weights, hidden(rows)), stage.mesh),
                ProgramSource(self._of_last(f"prefill/sample/{rows}"), sample_step(head), sampling, stage.mesh, options=options),
                ProgramSource(
                    self._of_last(f"prefill/repeat/{rows}"), repeat_step(self.num_rows), (hidden(rows), abstract((), np.int32)), stage.mesh
                ),
            ]
        for size in buckets:
            arguments = weights, hidden(size), abstract((size,), np.int32)
            sources.append(ProgramSource(self._of_last(f"prefill/score/{size}"), score_step(head), arguments, stage.mesh))
        return sources

    def masked_programs(self, buckets: tuple[int, ...]) -> list[ProgramSource]:
        """Those that sample first tokens with masks, one for each number of rows."""
        stage, head = self._last, self._last.template.head
        on_mesh, weights, sources = replicated(stage.mesh), head.abstract(stage.mesh, stage.rules), []
        for rows in sorted({prefill_rows(size) for size in buckets}):
            hidden = jax.ShapeDtypeStruct((rows, head.config.hidden_size), head.activation_dtype, sharding=on_mesh)
            given = np.zeros(rows, np.int32), neutral_rows(rows), np.zeros((rows, self.mask_words), np.int32)
            arguments = (weights, hidden, self._abstract_counts, *abstract_like(given, on_mesh))
            name, options = self._of_last(f"prefill/masked/{rows}"), options_of_sampling(stage.mesh)
            sources.append(ProgramSource(name, sample_step(head), arguments, stage.mesh, options=options))
        return sources

    def add_programs(self, programs: dict[str, Executable]) -> None:
        """Use these too from now on."""
        self._programs |= programs

    def _of_last(self, name: str) -> str:
        return program_name(name, self._stages, self.num_stages - 1)

    def start(self, programs: dict[str, Executable], weights: StagedWeights) -> None:
        """Set the compiled programs and the weights; allocate token counts."""
        self._programs = programs
        self.set_weights(weights)
        self.loads.reset()
        self._counts = jax.tree.map(lambda a: place(np.zeros(a.shape, a.dtype), a.sharding), self._abstract_counts)

    def add_bucket(self, size: int, programs: dict[str, Executable]) -> None:
        """Use these programs from now on."""
        self._programs |= programs
        self.buckets = tuple(sorted({*self.buckets, size}))

    def set_weights(self, weights: StagedWeights) -> None:
        """The weights of later steps; empty while there are none."""
        self._weights = weights
        self._head_weights = self._last.template.head_weights(weights[-1]) if weights else ()

    def count_tokens(self, row: int, token_ids: Sequence[int], num_prompt: int) -> None:
        """Count a sequence's tokens for the penalties of a row of the next step."""
        self._counts = self._programs["prefill/reset"](self._counts, *reset_arguments(row, token_ids, num_prompt, self.max_model_len))

    def run(self, batch: PrefillBatch) -> PrefillResult:
        """Start one step on every stage; returns arrays that the last stage has yet to compute."""
        handed: tuple[Any, ...] = ()
        found: Any = None
        ended: Ended | None = None
        launched_at = self._clock.now() if self._clock is not None else 0.0
        for number, (stage, weights) in enumerate(zip(self._stages, self._weights, strict=True)):
            program = self._programs[program_name(f"prefill/{len(batch.next_token_ids)}", self._stages, number)]
            loads = self.loads.counts[number]
            stage.pool.array, found, self.loads.counts[number] = program(
                weights, stage.pool.array, stage.pool.scales, batch.packed, loads, *handed
            )
            if stage is self._last:
                found = self._finish(batch, *found)
            if self._clock is not None:
                ended = self._clock.launched(number, launched_at, found.sampled.packed if stage is self._last else found, ended)
            if stage is not self._last:
                handed = (pass_on(found, self._stages[number + 1]),)
        result: PrefillResult = found
        for array in jax.tree.leaves((result.sampled, result.prompt_scores)):
            array.copy_to_host_async()
        return result

    def _finish(self, batch: PrefillBatch, hidden: Array, last: Array) -> PrefillResult:
        sampled = self._sample(last, batch.num_generated, batch.sampling, batch.grammars)
        if not batch.wants_prompt_logprobs:
            return PrefillResult(sampled, None, last)
        score = self._programs[self._of_last(f"prefill/score/{len(batch.next_token_ids)}")]
        return PrefillResult(sampled, score(self._head_weights, hidden, batch.next_token_ids), last)

    def _sample(self, last: Array, num_generated: Int[Any, " R"], rows: SamplingRows, grammars: Sequence[Grammar | None]) -> Sampled:
        """The host chooses the program: a branch on the device would block the host before its next launch."""
        sampled: Sampled
        if grammars:  # followed while the device computes the prompts
            masks = masks_for(grammars, len(num_generated), self.mask_words)
            program = self._programs[self._of_last(f"prefill/masked/{len(num_generated)}")]
            sampled = program(self._head_weights, last, self._counts, num_generated, rows, masks)
        elif are_greedy(rows, num_generated):
            sampled = self._programs[self._of_last(f"prefill/greedy/{len(num_generated)}")](self._head_weights, last)
        else:
            program = self._programs[self._of_last(f"prefill/sample/{len(num_generated)}")]
            sampled = program(self._head_weights, last, self._counts, num_generated, rows)
        return sampled

    def repeat(self, last_hidden: Array, row: int) -> Array:
        """One row of a step's last hidden states, copied `num_rows` times as `sample` takes it; stays on the device."""
        return self._programs[self._of_last(f"prefill/repeat/{len(last_hidden)}")](last_hidden, np.asarray(row, np.int32))

    def sample(self, last_hidden: Array, rows: SamplingRows, grammars: Sequence[Grammar | None] = ()) -> Sampled:
        """Start sampling the first tokens of sequences that share a prompt, from `repeat`'s result. `grammars`: of the
        first rows, if any has one."""
        sampled = self._sample(last_hidden, np.zeros(len(last_hidden), np.int32), rows, grammars)
        sampled.packed.copy_to_host_async()
        return sampled

    def copy_pages(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Start copying pages to others, on every stage: at most one for each group of layers."""
        for number, stage in enumerate(self._stages):
            program = self._programs[program_name("prefill/copy", self._stages, number)]
            stage.pool.array = program(stage.pool.array, self._padded(source_ids), self._padded(target_ids))

    def _padded(self, page_ids: Sequence[int]) -> np.ndarray:
        padded = np.full(self._stages[0].pool.spec.num_groups, NULL_PAGE, np.int32)
        padded[: len(page_ids)] = page_ids
        return padded
