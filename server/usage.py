"""The usage of each request: counted from its deltas, reported in its reply, summed for each tenant, and written to the
usage log."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from types import TracebackType

from jaxinfer.request import DeviceUsage, FinishReason, OutputDelta, RequestError
from server.backend import Overloaded, Unavailable
from server.logs import LoggedRequest, current_request
from server.usage_log import UsageLog

_GIVEN_UP = (FinishReason.ABORT, FinishReason.TIMEOUT)


class Outcome(enum.StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    TIMEOUT = "timeout"  # its deadline passed
    DISCONNECTED = "disconnected"  # its client left, or the server ended before it
    REFUSED = "refused"  # the queue was full, or it could never be served
    ABORTED = "aborted"  # the backend aborted it
    FAILED = "failed"  # an internal error


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The request and its tenant, as in its usage record."""

    id: str  # the answer's, in the body of a reply
    request_id: str  # the HTTP request's, in its headers
    tenant: str
    session: str | None
    endpoint: str
    model: str
    service_tier: str | None
    priority: int


@dataclass(slots=True)
class TenantTotals:
    """Sums over a tenant's requests that have ended. Only grow."""

    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    requests: Counter[Outcome] = field(default_factory=Counter)


class UsageMeter:
    """Totals by tenant, and the log. A tenant's name becomes a metric's label: there must be few, such as the API
    keys'."""

    def __init__(self, tenants: Iterable[str] = (), log: UsageLog | None = None) -> None:
        self.totals = {tenant: TenantTotals() for tenant in tenants}
        self._log = log

    def measure(self, asked: RequestIdentity, prompts: Sequence[Sized], n: int) -> RequestUsage:
        """To be entered when a request that passed its checks goes to the backend."""
        return RequestUsage(self, asked, [len(prompt) for prompt in prompts], n)

    def record(self, usage: RequestUsage, outcome: Outcome) -> None:
        """Adds a request's usage to its tenant's totals and to the log."""
        totals = self.totals.setdefault(usage.asked.tenant, TenantTotals())
        totals.requests[outcome] += 1
        if outcome is Outcome.REFUSED and not usage.has_begun:
            return  # nothing to bill
        totals.input_tokens += usage.input_tokens
        totals.cached_input_tokens += usage.cached_input_tokens
        totals.output_tokens += usage.output_tokens
        device = usage.device
        if device is not None:
            totals.queue_seconds += device.queue_seconds
            totals.prefill_seconds += device.prefill_seconds
            totals.decode_seconds += device.decode_seconds
        request = current_request.get()
        if request is not None:
            request.is_recorded = True
        if self._log is not None:
            self._log.write(
                {
                    "time": _now(),
                    **asdict(usage.asked),
                    "outcome": outcome,
                    "finish_reasons": usage.finish_reasons,
                    "input_tokens": usage.input_tokens,
                    "cached_input_tokens": usage.cached_input_tokens,
                    "output_tokens": usage.output_tokens,
                    **device_seconds(device),
                }
            )

    def record_refusal(self, request: LoggedRequest, endpoint: str, status: int) -> None:
        """Adds a line to the log for a request that was refused before it was measured: it used nothing."""
        if self._log is not None:
            self._log.write(
                {
                    "time": _now(),
                    "id": None,
                    "request_id": request.id,
                    "tenant": request.tenant,
                    "endpoint": endpoint,
                    "outcome": Outcome.REFUSED,
                    "status": status,
                    "error": request.error,
                }
            )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def device_seconds(device: DeviceUsage | None) -> dict[str, float | None]:
    """To the microsecond; None where the engine did not report it."""
    names = ("queue_seconds", "prefill_seconds", "decode_seconds")
    return {name: None if device is None else round(getattr(device, name), 6) for name in names}


class RequestUsage:
    """The usage of one HTTP request, with all its prompts and sequences. As a context manager around its deltas it is
    recorded when left, however that happens."""

    def __init__(self, meter: UsageMeter, asked: RequestIdentity, prompt_sizes: list[int], n: int) -> None:
        self.asked = asked
        self.output_tokens = 0
        self.finish_reasons: list[str | None] = [None] * (len(prompt_sizes) * n)  # prompt by prompt; None: unfinished
        self.has_begun = False  # the backend has sent something
        self._meter, self._n = meter, n
        self._prompt_sizes = prompt_sizes
        self._is_computed = [False] * len(prompt_sizes)
        self._cached = [0] * len(prompt_sizes)
        self._devices: list[DeviceUsage | None] = [None] * len(prompt_sizes)

    def add(self, delta: OutputDelta, prompt: int = 0) -> None:
        """Counts a delta of the prompt with that number."""
        self.has_begun = True
        self.output_tokens += len(delta.token_ids)
        if delta.device_usage is not None:
            self._devices[prompt] = delta.device_usage  # it includes those before
        # the first sequence's: the others start from the prompt that it computed
        if delta.cached_tokens and not delta.index:
            self._cached[prompt] = delta.cached_tokens
        reason = delta.finish_reason
        if reason is not None:
            self.finish_reasons[prompt * self._n + delta.index] = str(reason)
        if not self._is_computed[prompt]:  # aborted in the queue, a prompt has cost nothing
            device = delta.device_usage
            self._is_computed[prompt] = reason not in _GIVEN_UP or (device is not None and device.prefill_seconds > 0)

    @property
    def input_tokens(self) -> int:
        """Of the prompts that were computed, as far as is known."""
        return sum(size for size, is_computed in zip(self._prompt_sizes, self._is_computed, strict=True) if is_computed)

    @property
    def cached_input_tokens(self) -> int:
        """Of them, those with cached KV."""
        return sum(self._cached)

    @property
    def device(self) -> DeviceUsage | None:
        """Seconds so far; None as long as the engine has reported none."""
        known = [device for device in self._devices if device is not None]
        if not known:
            return None
        return DeviceUsage(
            sum(device.queue_seconds for device in known),
            sum(device.prefill_seconds for device in known),
            sum(device.decode_seconds for device in known),
        )

    def __enter__(self) -> RequestUsage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._meter.record(self, self._outcome(error))

    def _outcome(self, error: BaseException | None) -> Outcome:
        if FinishReason.TIMEOUT in self.finish_reasons:
            return Outcome.TIMEOUT
        match error:
            case None:
                return Outcome.FINISHED
            case asyncio.CancelledError() | GeneratorExit():
                return Outcome.DISCONNECTED
            case RequestError() | Overloaded():
                return Outcome.REFUSED
            case Unavailable():
                return Outcome.ABORTED if self.has_begun else Outcome.REFUSED
        return Outcome.FAILED
