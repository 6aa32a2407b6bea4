"""EncodeRunner: an encoder's weights and compiled programs on a mesh; one call a batch."""

from __future__ import annotations

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxinfer.encode.batch import EncodeBatch, empty_batch
from jaxinfer.encode.program import encode_step
from jaxinfer.encode.queue import BatchShape
from jaxinfer.models.bert import Bert
from jaxinfer.programs.compilation import Executable, ProgramSource, abstract_like
from jaxinfer.weights.template import Template, Weights
from sharding.partition import replicated
from sharding.rules import Rules


class EncodeRunner:
    def __init__(self, template: Template[Bert], mesh: Mesh, rules: Rules, shapes: list[BatchShape], *, normalizes: bool) -> None:
        self._mesh = mesh
        self._shapes = shapes
        self._abstract_weights = template.abstract(mesh, rules)
        self._step = encode_step(template, mesh, normalizes=normalizes)
        self._programs: dict[str, Executable] = {}
        self._weights: Weights = ()

    def programs(self) -> list[ProgramSource]:
        """The programs to compile, one a shape."""
        on_mesh = replicated(self._mesh)
        return [
            ProgramSource(_name(shape), self._step, (self._abstract_weights, abstract_like(empty_batch(*shape), on_mesh)), self._mesh)
            for shape in self._shapes
        ]

    def start(self, programs: dict[str, Executable], weights: Weights) -> None:
        """Set programs and weights, and run each program once: first runs take longer."""
        self._programs, self._weights = programs, weights
        for shape in self._shapes:
            jax.block_until_ready(self.run(empty_batch(*shape)))

    def run(self, batch: EncodeBatch) -> Float[Array, "S D"]:
        """Start a batch; returns embeddings that the device has yet to compute."""
        num_rows, width = batch.token_ids.shape
        embeddings: Array = self._programs[_name((num_rows, width))](self._weights, batch)
        embeddings.copy_to_host_async()
        return embeddings


def _name(shape: BatchShape) -> str:
    return f"encode/{shape[0]}x{shape[1]}"
