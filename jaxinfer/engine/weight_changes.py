"""WeightChanges: an engine's weights are replaced, put to sleep and woken, with its requests paused meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.array_source import ArraySource
from checkpoints.hub import open_source, resolve
from checkpoints.source import TensorSource
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.decode.role import DecodeRole
from jaxinfer.engine.preemption import Preemption
from jaxinfer.engine.remote_handoffs import RemoteHandOffs
from jaxinfer.engine.served_weights import ServedWeights
from jaxinfer.engine.unfinished_requests import UnfinishedRequests
from jaxinfer.prefill.role import PrefillRole
from jaxinfer.sequence import Sequence, SequenceState
from jaxinfer.stats import EngineStats


class WeightChanges:
    """A paused request keeps its tokens and goes on after them, which is by the new weights if these were replaced:
    its keys and values are computed again. `is_asleep`: there are no weights on the devices, and no step can run."""

    def __init__(
        self,
        config: EngineConfig,
        weights: ServedWeights,
        prefill: PrefillRole,
        decode: DecodeRole,
        preemption: Preemption,
        requests: UnfinishedRequests,
        remote: RemoteHandOffs,
        stats: EngineStats,
    ) -> None:
        self._config, self._weights, self._stats = config, weights, stats
        self._prefill, self._decode, self._preemption = prefill, decode, preemption
        self._requests, self._remote = requests, remote
        self._paused: list[Sequence] = []
        self.is_asleep = False

    def update_params(self, params: Mapping[str, Any]) -> int:
        """See `Engine.update_params`."""
        return self._replace(ArraySource(self._weights.source_config, params), is_kept=False)

    def update_weights(self, model: str) -> int:
        """See `Engine.update_weights`."""
        return self._replace(open_source(resolve(model)), is_kept=True)

    def _replace(self, source: TensorSource, *, is_kept: bool) -> int:
        """Nothing is changed by weights that don't fit. If reading fails, those before are loaded again; where they are
        gone the engine is asleep, and one that was stays so."""
        self._refuse_others()
        self._weights.check(source)
        was_asleep = self.is_asleep
        self._pause()
        try:
            self._weights.replace(source, is_kept=is_kept)
        except BaseException:
            if was_asleep:
                self._weights.drop()
            elif self._weights.is_loaded:
                self._resume()
            raise
        self._stats.weights_version += 1
        self._weights.allocate_pages()
        self._weights.scale_pages()
        self._resume()
        return self._stats.weights_version

    def sleep(self, level: int) -> None:
        """Give the devices' memory back: that of all pages, and that of the weights, which go to host memory (level 1)
        or are dropped (level 2). Of a model asleep the level can be raised."""
        if level not in (1, 2):
            raise ConfigError(f"level is {level}: 1 moves the weights to host memory, 2 drops them")
        self._refuse_others()
        if not self.is_asleep:
            self._pause()
            self._weights.to_host()
        if level == 2:
            self._weights.drop()

    def wake(self) -> None:
        """Load the weights again and go on with what was paused. Raises `CheckpointError`, still asleep."""
        if self.is_asleep:
            self._weights.restore()
            self._resume()

    def _pause(self) -> None:
        """Take all requests from the roles; forget all that was computed with these weights."""
        if self.is_asleep:
            return
        every = [sequence for sequences in self._requests.values() for sequence in sequences]
        self._paused = self._preemption.pause([sequence for sequence in every if not self._remote.holds(sequence)])
        for manager in {self._prefill.manager, self._decode.manager}:
            manager.invalidate()
        if self._prefill.tiers is not None:
            self._prefill.tiers.invalidate()
        self._weights.release_pages()
        self.is_asleep = self._stats.is_asleep = True

    def _resume(self) -> None:
        if not self._weights.has_pages:
            self._weights.allocate_pages()
        self.is_asleep = self._stats.is_asleep = False
        paused, self._paused = [sequence for sequence in self._paused if sequence.state is SequenceState.PAUSED], []
        for sequence in paused:
            sequence.state = SequenceState.WAITING
        for sequence in paused:  # once all are known to wait: some wait for others
            self._prefill.add(sequence)

    def _refuse_others(self) -> None:
        """Raise `ConfigError` where keys and values of the old weights would be left that can't be forgotten."""
        cache = self._config.cache
        for is_so, what in (
            (self._config.devices.num_processes > 1, "of several processes"),
            (bool(cache.kv_disk), "with kv_disk, whose file has pages of the weights it started with"),
            (cache.kv_peers, "with kv_peers, which have pages of its weights"),
            (self._remote.is_used or bool(self._decode.outgoing), "that shares requests with others"),
        ):
            if is_so:
                raise ConfigError(f"the weights of an engine {what} can't be changed or put to sleep: start another one")
