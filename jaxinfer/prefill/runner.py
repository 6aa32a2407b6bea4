"""PrefillRunner: the prefill mesh's arrays and compiled programs, and one call a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.kv_cache.pages import PagePool
from jaxinfer.prefill.batch import PrefillBatch, empty_batch
from jaxinfer.prefill.program import PromptScores, prefill_step
from jaxinfer.runtime.buckets import prefill_rows
from jaxinfer.runtime.compilation import Executable, ProgramSource, abstract_like
from jaxinfer.runtime.template import ModelTemplate, Weights
from jaxinfer.sampling.counting import TokenCounts, abstract_counts, reset_arguments, reset_program
from jaxinfer.sampling.sampler import Sampled
from pallas_kernels.dispatch import Backend
from sharding.partition import place, replicated
from sharding.rules import Rules


class PrefillResult(NamedTuple):
    sampled: Sampled
    prompt_scores: PromptScores | None  # where the batch asked for them


class PrefillRunner:
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
        self.max_model_len = max_model_len
        self.buckets = buckets
        self.table_width = pool.spec.runs_for(max_model_len) * pool.spec.num_groups
        self._abstract_weights = template.abstract(mesh, rules)
        self._abstract_counts = abstract_counts(prefill_rows(buckets[-1]), template.config.vocab_size, replicated(mesh))
        self._step = prefill_step(template, mesh, attention)
        self._programs: dict[str, Executable] = {}
        self._weights: Weights = ()
        self._counts: TokenCounts | None = None

    def programs(self) -> list[ProgramSource]:
        """What to compile: a prefill program a bucket, and the one that counts a sequence's tokens for its penalties."""
        on_mesh = replicated(self._mesh)
        batches = {size: empty_batch(size, prefill_rows(size), self.table_width) for size in self.buckets}
        return [
            ProgramSource(
                f"prefill/{size}",
                self._step,
                (self._abstract_weights, self._pool.abstract, self._abstract_counts, abstract_like(batch, on_mesh)),
                self._mesh,
                donated=(1,),
            )
            for size, batch in batches.items()
        ] + [reset_program("prefill/reset", self._abstract_counts, self.max_model_len, self._mesh)]

    def start(self, programs: dict[str, Executable], weights: Weights) -> None:
        """Take the compiled programs and the weights; allocate what else stays on the device."""
        self._programs, self._weights = programs, weights
        self._counts = place(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self._abstract_counts), replicated(self._mesh))

    def count_tokens(self, row: int, token_ids: Sequence[int], num_prompt: int) -> None:
        """Make a sequence's tokens known to the penalties of the next step's row."""
        self._counts = self._programs["prefill/reset"](self._counts, *reset_arguments(row, token_ids, num_prompt, self.max_model_len))

    def run(self, batch: PrefillBatch) -> PrefillResult:
        """Start one step; returns arrays that the device is yet to fill."""
        program = self._programs[f"prefill/{len(batch.token_ids)}"]
        self._pool.array, sampled, scores = program(self._weights, self._pool.array, self._counts, batch)
        result = PrefillResult(sampled, scores if batch.wants_prompt_logprobs else None)
        for array in jax.tree.leaves(result):
            array.copy_to_host_async()
        return result
