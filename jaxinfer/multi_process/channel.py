"""The channel from the first process to the others: a gRPC stream each, which also detects lost processes. Imports no
JAX.

Security: the leader listens on the given address only. Whoever can connect to it before all processes have joined can
take part, so give an address of a private network.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from jaxinfer.config import ConfigError
from jaxinfer.multi_process.peer_failure import PeerFailureMonitor, ProcessLostError

_LOG = logging.getLogger(__name__)

HEARTBEAT = 20.0  # seconds, by default
_SERVICE, _FOLLOW, _REPORT = "jaxinfer.Processes", "Follow", "Report"
_BEATS = 4  # heartbeats in the time after which a silent process counts as lost
_GRACE = 5.0  # seconds for a message, or a connection's end
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # else two leaders could listen on one port
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
]

Greeting = Mapping[str, Any]  # what a process sends when it joins, as JSON
Judge = Callable[[Greeting], str | None]  # why a greeting's process can't join, or None


class LeaderChannel:
    """Waits until all others have joined, then broadcasts messages in order. Any thread may call any method."""

    def __init__(self, address: str, num_processes: int, judge: Judge, seconds: float, heartbeat: float = HEARTBEAT) -> None:
        """`heartbeat`: seconds of silence after which a process counts as lost. Raises `ConfigError` if it can't
        listen."""
        self.monitor = PeerFailureMonitor()
        self._address, self._num_processes, self._judge, self._seconds = address, num_processes, judge, seconds
        self._changed = threading.Condition()
        self._queues: dict[int, queue.SimpleQueue[bytes | None]] = {}  # messages to send, by process
        self._peers: dict[int, str] = {}
        self._arrived: dict[int, tuple[int, str]] = {}  # the barrier that each process waits at, and its plan
        self._is_done = False  # with barriers
        self._refused = ""
        self._is_closing = False
        self._heartbeat, self._seen_at = heartbeat, dict[int, float]()  # seconds, time.monotonic(), by process
        self._server = grpc.server(ThreadPoolExecutor(num_processes + 4, "processes"), options=_OPTIONS)
        handlers = {
            _FOLLOW: grpc.unary_stream_rpc_method_handler(self._follow),
            _REPORT: grpc.unary_unary_rpc_method_handler(self._report),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(f"coordinator is {address}, where this process can't listen: give an address of this machine and a free port")
        self._server.start()
        threading.Thread(target=self._watch, name="processes-alive", daemon=True).start()

    def wait_for_all(self) -> None:
        """Wait until every process has joined. Raises `ConfigError` if some don't in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._queues) == self._num_processes - 1, self._seconds):
                missing = sorted(set(range(1, self._num_processes)) - set(self._queues))
                raise ConfigError(
                    f"num_processes is {self._num_processes}, but processes {', '.join(map(str, missing))} didn't join within "
                    f"{self._seconds:g} s: start each with `jaxinfer follow` and its own process_id{self._refused}"
                )

    def meet(self, point: int, about: str = "", *, is_last: bool = False) -> None:
        """A barrier: waits until every process waits at the same `point`, numbered from 1. Raises `ProcessLostError` if
        one is lost, and `ConfigError` if one reports a different `about`."""
        others = range(1, self._num_processes)
        with self._changed:
            self._changed.wait_for(
                lambda: all(self._arrived.get(p, (0, ""))[0] >= point for p in others) or self.monitor.reason is not None
            )
            self.monitor.check()
            for process in others:
                theirs = self._arrived[process][1]
                if theirs != about:
                    raise ConfigError(f"process {process} has another plan: {theirs}; process 0 has {about}")
            self._is_done = is_last
        self.send(b"")

    def send(self, message: bytes) -> None:
        """Broadcast a message. Raises `ProcessLostError` if a process is lost."""
        self.monitor.check()
        for waiting in self._queues.values():
            waiting.put(message)

    def close(self) -> None:
        """End the others' streams, and wait a moment for that. Before the last barrier this is an error for them, since
        they may be waiting for this process's devices."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            for waiting in self._queues.values() if self._is_done else ():
                waiting.put(None)
        self._server.stop(_GRACE if self._is_done else 0).wait(_GRACE)
        for waiting in self._queues.values():
            waiting.put(None)  # ends its thread

    def _follow(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        greeting = json.loads(request)
        process, waiting = greeting["process_id"], queue.SimpleQueue[bytes | None]()
        with self._changed:
            reason = self._judge(greeting) or (f"another process is number {process} already" if process in self._queues else None)
            if reason is None:
                self._queues[process], self._peers[process] = waiting, context.peer()
                self._seen_at[process] = time.monotonic()
                self._changed.notify_all()
            else:
                self._refused = f" ({context.peer()} came and was refused: {reason})"
        if reason is not None:
            _LOG.warning("process %s at %s is refused: %s", process, context.peer(), reason)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        if not context.add_callback(lambda: self._ended(process)):
            self._ended(process)
        while (message := waiting.get()) is not None:
            yield message

    def _report(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        report = json.loads(request)
        with self._changed:
            self._seen_at[report["process_id"]] = time.monotonic()
            if report.get("is_beat"):
                return b""
            if report.get("error") is None:
                self._arrived[report["process_id"]] = report["point"], report["about"]
            else:
                self.monitor.report_lost(f"process {report['process_id']} ({context.peer()}) failed: {report['error']}")
            self._changed.notify_all()
        return b""

    def _watch(self) -> None:
        """Detect processes that are stopped, or whose machine is down: their connections stay open."""
        while not self._is_closing and self.monitor.reason is None:
            time.sleep(self._heartbeat / _BEATS)
            with self._changed:
                for process in () if self._is_closing else tuple(self._queues):
                    if time.monotonic() - self._seen_at[process] > _most_silent(self._heartbeat):
                        self.monitor.report_lost(
                            _silent(f"process {process} of {self._num_processes} ({self._peers[process]})", self._heartbeat)
                        )
                        self._changed.notify_all()

    def _ended(self, process: int) -> None:
        with self._changed:
            if not self._is_closing:
                self.monitor.report_lost(
                    f"process {process} of {self._num_processes} ({self._peers[process]}) is gone: start all of them again"
                )
            self._queues[process].put(None)  # ends its thread
            self._changed.notify_all()


class FollowerChannel:
    """One process's connection to the leader; `messages` ends when the leader closes it."""

    def __init__(self, address: str, greeting: Greeting, seconds: float, heartbeat: float = HEARTBEAT) -> None:
        """`heartbeat`: the leader's. Raises `ConfigError` if no leader answers in time."""
        self.monitor = PeerFailureMonitor()
        self._address, self._process = address, greeting["process_id"]
        self._is_closing = False
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        try:
            grpc.channel_ready_future(self._channel).result(seconds)
        except grpc.FutureTimeoutError as error:
            self._channel.close()
            raise ConfigError(
                f"coordinator is {address}, where nobody listened for {seconds:g} s: start process 0, with the same coordinator"
            ) from error
        self._stream = self._channel.unary_stream(f"/{_SERVICE}/{_FOLLOW}")(json.dumps(greeting).encode())
        self._stream.add_callback(self._ended)
        self._heartbeat = heartbeat
        threading.Thread(target=self._beat, name="processes-alive", daemon=True).start()

    def messages(self) -> Iterator[bytes]:
        """The leader's messages. Raises `ConfigError` if it refuses this process, `ProcessLostError` if it is lost."""
        try:
            yield from self._stream
        except grpc.RpcError as error:
            if self._stream.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise ConfigError(f"process 0 at {self._address} refuses this process: {self._stream.details()}") from error
            raise ProcessLostError(self._gone) from error

    def report(self, point: int = 0, about: str = "", *, error: str | None = None) -> None:
        """Tell the leader which barrier this process waits at, and its plan; or the error that it ends with."""
        report = {"process_id": self._process, "point": point, "about": about, "error": error}
        try:
            self._channel.unary_unary(f"/{_SERVICE}/{_REPORT}")(json.dumps(report).encode(), timeout=_GRACE)
        except grpc.RpcError as failure:
            if error is None:
                raise ProcessLostError(self._gone) from failure

    def _beat(self) -> None:
        """Send heartbeats, and watch for the leader's answers."""
        sign, answered_at = json.dumps({"process_id": self._process, "is_beat": True}).encode(), time.monotonic()
        call = self._channel.unary_unary(f"/{_SERVICE}/{_REPORT}")
        while not self._is_closing and not self._stream.done() and self.monitor.reason is None:
            try:
                call(sign, timeout=_most_silent(self._heartbeat))
                answered_at = time.monotonic()
            except (grpc.RpcError, ValueError):  # ValueError: the channel was closed
                if time.monotonic() - answered_at > self._heartbeat and not self._is_closing and not self._stream.done():
                    self.monitor.report_lost(_silent(f"process 0 ({self._address})", self._heartbeat))
            time.sleep(self._heartbeat / _BEATS)

    def close(self) -> None:
        """Disconnect."""
        self._is_closing = True
        self._channel.close()

    @property
    def _gone(self) -> str:
        return f"process 0 ({self._address}) is gone: start all of them again"

    def _ended(self) -> None:
        if not self._is_closing and self._stream.code() not in (grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION):
            self.monitor.report_lost(self._gone)


def _most_silent(heartbeat: float) -> float:
    """Longest time between two heartbeats of a process that was stopped for `heartbeat` seconds."""
    return heartbeat * (1 + 1 / _BEATS)


def _silent(who: str, heartbeat: float) -> str:
    return f"{who} has shown no sign of life for {heartbeat:g} s (heartbeat_seconds): start all of them again"
