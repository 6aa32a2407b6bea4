"""Engine: add_request, step, abort. Coordinates one prefill role and one decode role in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from typing import Any

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.engine.builder import build
from jaxinfer.engine.cached_pages import CachedPages
from jaxinfer.engine.components import EngineComponents
from jaxinfer.engine.intake import RequestIntake
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.output import OutputBuilder
from jaxinfer.engine.preemption import Preemption
from jaxinfer.engine.publishing import Publishing
from jaxinfer.engine.remote_handoffs import RemoteHandOffs
from jaxinfer.engine.steps import StepRunner
from jaxinfer.engine.unfinished_requests import UnfinishedRequests
from jaxinfer.engine.weight_changes import WeightChanges
from jaxinfer.engine_access import EngineAccess
from jaxinfer.kv_transfer.remote import Remote
from jaxinfer.multi_process.peer_failure import ProcessLostError
from jaxinfer.programs.profile import Profile
from jaxinfer.reference_forward import ReferenceForward
from jaxinfer.request import DEFAULT_CONTEXT, MODEL_ASLEEP, FinishReason, OutputDelta, RequestContext, RequestError, SamplingParams
from jaxinfer.segments import Prompt
from jaxinfer.start_progress import StartProgress
from jaxinfer.stats import EngineStats


class Engine:
    """Coordinates both roles from one thread.

    Only that thread calls `add_request`, `step` and `abort`; any may call `validate`. While an `EngineLoop` has
    requests, these calls raise `RequestError` in other threads. `encode`: the embedding model's worker, or None.

    The constructor returns when weights are loaded and every program is compiled; `progress` reports to other
    threads. Raises `ConfigError`, `CheckpointError` or `UnsupportedModelError`: `ValueError`s that say what to change.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        build: Callable[[EngineConfig, EngineStats], EngineComponents] = build,
        progress: StartProgress | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        schedule, devices = self.config.schedule, self.config.devices
        self.stats = EngineStats(start=progress or StartProgress(), target_ttft=schedule.target_ttft, target_itl=schedule.target_itl)
        self._profile = Profile(devices.profile, devices.profile_seconds) if devices.profile is not None else None
        self._components = components = build(self.config, self.stats)
        self._prefill, self._decode, self._clock = components.prefill, components.decode, components.clock
        self.tokenizer, self.encode, self.cached_pages = components.tokenizer, components.encode, CachedPages(self._prefill, self._decode)
        # Defaults of `SamplingParams` by name: callers apply them where a request leaves a field out.
        self.sampling_defaults = components.sampling_defaults
        self.vocab_size, self.page_spec = components.plan.template.config.vocab_size, self._decode.manager.spec
        self.max_model_len, self.shares_mesh = components.plan.max_model_len, components.plan.shares_mesh
        self._intake = RequestIntake(self.tokenizer, self.vocab_size, self.max_model_len, self._clock, components.grammars)
        self.access, roles = EngineAccess(lambda: self.has_requests), (self._prefill, self._decode)
        self._preemption = Preemption(*roles, self.shares_mesh, schedule.max_batch_size, self.stats)
        self._output, self._metrics = OutputBuilder(self.tokenizer, self.stats, schedule), EngineMetrics(self.stats, *roles)
        self._steps = StepRunner(*roles, self._preemption, self._metrics, schedule.max_batch_size, self.shares_mesh, self._clock)
        self._remote = RemoteHandOffs(*roles, self._preemption, lambda: self._steps.has_slot, self.stats, components.structured)
        self._requests = UnfinishedRequests(self._prefill, self._preemption, self._remote, self.stats)
        self._publishing = Publishing(self._prefill, self._requests, self._remote, self._output, self._metrics, self._clock)
        self._changes = WeightChanges(self.config, components.weights, *roles, self._preemption, self._requests, self._remote, self.stats)

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do. Steps may still be in flight when the last request has ended."""
        if self._changes.is_asleep:
            return False
        return bool(self._requests) or self._decode.num_in_flight > 0 or self._prefill.num_in_flight > 0

    def on_process_loss(self, listener: Callable[[ProcessLostError], None]) -> None:
        """Register a listener, called in a thread of its own, for the loss of one of several processes: see `step`."""
        self._components.processes.on_loss(listener)

    def close(self) -> None:
        """Save the prefix cache to `kv_disk` if there is one (takes seconds at most), release it, and write a profile
        that is being recorded. No call is allowed afterwards, except `close`, which then does nothing."""
        if self.access.is_closed:
            return
        with self.access.call():
            self.access.close()
            if self._profile is not None:
                self._profile.stop()
            if self._prefill.tiers is not None:
                self._prefill.tiers.close()
            self._components.stop_compiling()
            self._components.processes.close()

    def reference_forward(self) -> ReferenceForward:
        """The model without KV cache or batching, on decode's weights: the reference for the engine's numbers. Raises
        `ConfigError` for an engine of several processes: all of them would have to launch it."""
        components = self._components
        if self.config.devices.num_processes > 1:
            raise ConfigError("the reference forward pass (logits, logprobs) can't span processes: ask for logprobs while generating")
        return ReferenceForward(
            [(stage.template, stage.mesh) for stage in components.plan.decode.stages], lambda: components.weights.decode
        )

    def validate(self, prompt: Tokens[int] | Prompt, params: SamplingParams) -> Prompt:
        """The prompt as `add_request` takes it without another check, truncated as `params` ask. Raises `RequestError`
        for a request that could never be served. A `max_tokens` that exceeds the context is no error: it is
        clamped."""
        return self._intake.validate(prompt, params)

    def add_request(
        self,
        request_id: str,
        prompt: Tokens[int] | Prompt,
        params: SamplingParams,
        context: RequestContext = DEFAULT_CONTEXT,
        remote: Remote | None = None,
        output_ids: Tokens[int] = (),
    ) -> None:
        """Queue a request of token ids, or of what `validate` gave. Of one with n=1 another engine may do a half, or
        have given `output_ids` already. Raises `RequestError` if it can't be served or its id is in use."""
        with self.access.call():
            if self._changes.is_asleep:
                raise RequestError("the model is asleep: wake it first", code=MODEL_ASLEEP)
            if request_id in self._requests:
                raise RequestError(f"request id {request_id!r} is in use", "request_id")
            sequences = self._intake.sequences(request_id, prompt, params, context, output_ids)
            self._requests.add(request_id, sequences)
            for sequence in sequences:
                self._remote.add(sequence, remote)
            self._metrics.observe_request(sequences[0])

    def update_params(self, params: Mapping[str, Any]) -> int:
        """Serve other weights of the same model from now on; returns their version (the first ones are 1). `params`:
        arrays of floats by Hugging Face's names, all of them, flat or nested, with matrices as [out, in]; they are not
        kept. Nothing compiles. The prefix cache is emptied; requests under way go on by the new weights. Raises
        `CheckpointError` with nothing changed for weights that don't fit, `ConfigError` for an engine that can't."""
        with self.access.call():
            return self._changes.update_params(params)

    def update_weights(self, model: str) -> int:
        """As `update_params`, from a folder, a .gguf file or a Hugging Face id."""
        with self.access.call():
            return self._changes.update_weights(model)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and pages back until `wake` or `update_params`. Weights go to host memory (level
        1) or are dropped (2); requests under way are paused, new ones raise `RequestError`. Raises `ConfigError`."""
        with self.access.call():
            self._changes.sleep(level)

    def wake(self) -> None:
        """Undo `sleep`; does nothing in an engine that is awake. Raises `CheckpointError` for weights that are gone."""
        with self.access.call():
            self._changes.wake()

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is, and free its pages on both meshes. False if there is none."""
        with self.access.call():
            sequences = self._requests.get(request_id)
            if sequences is None:
                return False
            for sequence in list(sequences):
                self._requests.finish(sequence, FinishReason.ABORT)
            self._metrics.update_gauges()
            return True

    def step(self) -> list[OutputDelta]:
        """Run one iteration; returns its deltas. Raises `ProcessLostError` where one of several processes is gone, or
        never returns; this process then ends within seconds."""
        with self.access.call(), self._components.processes.surface_peer_failure():
            if self._profile is not None and self.has_work:
                self._profile.tick()
            self._metrics.begin()
            deltas = self._schedule()
            launched = self._steps.launch()
            self._remote.advance()
            collected = self._steps.collect(launched)
            has_changed = launched.has_prompts or bool(deltas or collected.prefilled)
            deltas += self._publishing.collected(collected)
            self._decode.sample_launched()
            self._metrics.end(deltas, launched_decode=launched.decode, has_changed=has_changed)
            return deltas

    def _schedule(self) -> list[OutputDelta]:
        """End requests whose deadline has passed; queue those whose pages have come from the tiers."""
        now, deltas = self._clock(), []
        self.stats.num_programs += self._components.later.poll()
        for sequences in self._requests.overdue(now):
            if sequences[0].prefill.first_scheduled_time is None:  # it waited to the end
                self._metrics.observe_queue(sequences[0], now)
            deltas += [self._publishing.cut(sequence, FinishReason.TIMEOUT) for sequence in sequences]
        self._steps.poll_tiers()
        return deltas + [self._publishing.arrived(arrived, now) for arrived in self._remote.poll(is_idle=self._steps.is_idle)]
