"""One engine over several processes: how they join, which calls they repeat, how the loss of one is noticed.

Multi-controller SPMD: every process builds the same engine over all processes' devices. Then the first drives it and
the others repeat its calls, so that all launch the same programs in the same order. Each program's collectives wait
for the other processes.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import Mesh

from jaxinfer.config import ConfigError, EngineConfig, parse_address
from jaxinfer.multi_process.calls import Recorder, Replayer
from jaxinfer.multi_process.channel import FollowerChannel, Greeting, LeaderChannel
from jaxinfer.multi_process.peer_failure import PeerFailureMonitor, ProcessLostError
from jaxinfer.multi_process.relay import Relay
from jaxinfer.programs.key import sources

OWN_SETTINGS = (
    "process_id",
    "model",
    "profile",
    "connect_seconds",
    "heartbeat_seconds",
)  # may differ between processes: the model's path, for one
_SHUTDOWN = 60  # seconds that JAX's own service waits for all processes at exit
# `channel` detects lost processes. JAX's own heartbeat aborts every process with a C++ trace, so it must never time
# out.
_NEVER = 10**7  # seconds
_NOTICED = 2.0  # seconds, at most, between a collective's failure and the notice that a process is lost

T = TypeVar("T")


class Processes(Protocol):
    """The processes that an engine spans, as its builder and its coordinator see them."""

    def share(self, name: str, target: T) -> T:
        """A proxy of the target, whose public methods are called in all processes."""
        ...

    def compiled(self, plan: str) -> None:
        """Wait until all processes are about to launch their first program: its collectives would time out while
        another process compiles. Raises `ConfigError` if plans differ: the programs would not match."""
        ...

    def wait_until_built(self) -> None:
        """Wait until all processes have warmed up their programs. From now on they repeat the first one's calls."""
        ...

    def check(self, what: str, mesh: Mesh) -> None:
        """Raise `ConfigError` for a mesh that these processes can't drive together."""
        ...

    def on_loss(self, listener: Callable[[ProcessLostError], None]) -> None:
        """Register a listener for the loss of a process; called in a thread of its own. This process then ends within
        seconds."""
        ...

    def surface_peer_failure(self) -> AbstractContextManager[None]:
        """Within this context, errors caused by the loss of a process become `ProcessLostError`."""
        ...

    def close(self) -> None:
        """End the other processes."""
        ...


class SingleProcess:
    """One process with all devices. See `Processes`."""

    def share(self, name: str, target: T) -> T:
        return target

    def compiled(self, plan: str) -> None:
        pass

    def wait_until_built(self) -> None:
        pass

    def check(self, what: str, mesh: Mesh) -> None:
        pass

    def on_loss(self, listener: Callable[[ProcessLostError], None]) -> None:
        pass

    def surface_peer_failure(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class Leader:
    """The first of several processes. See `Processes`."""

    def __init__(self, channel: LeaderChannel) -> None:
        self._channel = channel
        self._recorder = Recorder(channel.send)

    def share(self, name: str, target: T) -> T:
        return self._recorder.record(name, target)

    def compiled(self, plan: str) -> None:
        self._channel.meet(1, plan)

    def wait_until_built(self) -> None:
        self._channel.meet(2, is_last=True)
        self._recorder.start()

    def check(self, what: str, mesh: Mesh) -> None:
        check_spans_all(what, mesh)

    def on_loss(self, listener: Callable[[ProcessLostError], None]) -> None:
        self._channel.monitor.on_loss(listener)

    def surface_peer_failure(self) -> AbstractContextManager[None]:
        return surface_peer_failure(self._channel.monitor)

    def close(self) -> None:
        self._channel.close()


class Follower:
    """Any other of several processes. See `Processes`."""

    def __init__(self, channel: FollowerChannel, messages: Iterator[bytes]) -> None:
        self._channel, self._messages = channel, messages
        self._replayer = Replayer()

    def share(self, name: str, target: T) -> T:
        self._replayer.add(name, target)
        return target

    def compiled(self, plan: str) -> None:
        self._channel.report(1, plan)
        next(self._messages)

    def wait_until_built(self) -> None:
        self._channel.report(2)
        next(self._messages)

    def check(self, what: str, mesh: Mesh) -> None:
        check_spans_all(what, mesh)

    def on_loss(self, listener: Callable[[ProcessLostError], None]) -> None:
        self._channel.monitor.on_loss(listener)

    def surface_peer_failure(self) -> AbstractContextManager[None]:
        return surface_peer_failure(self._channel.monitor)

    def close(self) -> None:
        pass  # `follow` disconnects, after reporting an error

    def follow(self) -> None:
        """Repeat the leader's calls until it closes."""
        for message in self._messages:
            self._replayer.make(message)


def lead(config: EngineConfig) -> Processes:
    """Join the others as the first process, before anything uses JAX's devices. Raises `ConfigError` if some don't
    join."""
    devices = config.devices
    if devices.num_processes == 1:
        return SingleProcess()
    if devices.process_id:
        raise ConfigError(f"process_id is {devices.process_id}, but only process 0 takes requests: run `jaxinfer follow` with these flags")
    assert devices.coordinator is not None, "checked by the configuration"
    host, _ = parse_address("coordinator", devices.coordinator)
    ours, versions = _settings(config), _versions()

    def judge(greeting: Greeting) -> str | None:
        if greeting["versions"] != versions:
            return f"it runs {greeting['versions']}, process 0 {versions}: install the same everywhere"
        try:
            theirs = _settings(EngineConfig.of(**(ours | greeting["settings"] | {"process_id": greeting["process_id"]})))
        except ConfigError as error:
            return str(error)
        for name in sorted(theirs.keys() - set(OWN_SETTINGS)):
            if theirs[name] != ours[name]:
                return f"{name} is {theirs[name]} there, but {ours[name]} in process 0: give both the same, or leave it out there"
        return None if greeting["process_id"] else "process_id is 0, which is process 0's own: give another"

    channel = LeaderChannel(devices.coordinator, devices.num_processes, judge, devices.connect_seconds, devices.heartbeat_seconds)
    try:
        channel.wait_for_all()
        address = f"{devices.coordinator.rpartition(':')[0]}:{_free_port(host)}"
        given = {name: value for name, value in ours.items() if name not in ("process_id", "profile")}
        channel.send(json.dumps({"jax": address, "settings": given}).encode())
        start_jax(config, address)
    except BaseException:
        channel.close()
        raise
    atexit.register(channel.close)  # runs before JAX's handler, which waits for the others to end
    return Leader(channel)


def meet_leader(given: Mapping[str, Any]) -> tuple[EngineConfig, FollowerChannel, Iterator[bytes]]:
    """Join the leader. Returns its configuration with this process's OWN_SETTINGS, the channel, and the messages to
    come. Raises `ConfigError` if there is no leader, or it refuses this process."""
    address, process_id = given.get("coordinator"), given.get("process_id")
    if not address:
        raise ConfigError("`jaxinfer follow` needs process 0's address: give --coordinator HOST:PORT, as process 0 has it")
    if not process_id:
        has = "" if process_id is None else f", not {process_id}, which is process 0's"
        raise ConfigError(f"`jaxinfer follow` needs a number of its own: give --process-id, from 1 on{has}")
    parse_address("coordinator", address)
    greeting = {"process_id": process_id, "versions": _versions(), "settings": {k: v for k, v in given.items() if k not in OWN_SETTINGS}}
    own = {name: given.get(name, getattr(EngineConfig().devices, name)) for name in ("connect_seconds", "heartbeat_seconds")}
    channel = FollowerChannel(address, greeting, own["connect_seconds"], own["heartbeat_seconds"])
    try:
        messages = channel.messages()
        welcome = json.loads(next(messages))
        config = EngineConfig.of(**(welcome["settings"] | given))
        start_jax(config, Relay(parse_address("coordinator", welcome["jax"]), own["connect_seconds"]).address)
    except BaseException:
        channel.close()
        raise
    return config, channel, messages


def start_jax(config: EngineConfig, address: str) -> None:
    """Make JAX use the devices of all processes. Raises `ConfigError` if it has started already."""
    devices = config.devices
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            devices.num_processes,
            devices.process_id,
            coordinator_bind_address=address,
            initialization_timeout=int(devices.connect_seconds),
            heartbeat_timeout_seconds=_NEVER,
            shutdown_timeout_seconds=_SHUTDOWN,
            cluster_detection_method="deactivate",  # everything it would detect is given
        )
    except RuntimeError as error:
        raise ConfigError(f"num_processes is {devices.num_processes}, but JAX can't start so in this process: {error}") from error


def check_spans_all(what: str, mesh: Mesh) -> None:
    """Raise `ConfigError` unless each process has devices of this mesh: only those that do launch its programs."""
    missing = sorted(set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat})
    if missing:
        devices = [device.process_index for device in jax.devices()]
        of_each = "; ".join(
            f"{devices.index(p)} to {devices.index(p) + devices.count(p) - 1} are process {p}'s" for p in sorted(set(devices))
        )
        raise ConfigError(f"{what} has no device of process {missing[0]}: give it some of every process ({of_each})")


@contextmanager
def surface_peer_failure(monitor: PeerFailureMonitor) -> Iterator[None]:
    """Turn device errors caused by the loss of a process into `ProcessLostError`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if monitor.is_lost.wait(_NOTICED):
            raise ProcessLostError(monitor.reason) from error
        raise


def _settings(config: EngineConfig) -> dict[str, Any]:
    """All settings by flat name, as JSON values."""
    parts = [getattr(config, part.name) for part in dataclasses.fields(config)]
    return json.loads(json.dumps({setting.name: getattr(part, setting.name) for part in parts for setting in dataclasses.fields(part)}))


def _versions() -> str:
    return f"jaxinfer {version('jaxinfer')} (sources {sources()[:12]}) with JAX {jax.__version__}"


def _free_port(host: str) -> int:
    """A free port for JAX's own service."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
