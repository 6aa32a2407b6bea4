"""How processes meet: who is let in, and how the end of one is noticed. No device takes part."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.multi_process.channel import FollowerChannel, LeaderChannel
from jaxinfer.multi_process.peer_failure import PROCESS_LOST, PeerFailureMonitor, ProcessLostError
from jaxinfer.multi_process.processes import lead, meet_leader, surface_peer_failure
from tests.multi_process.test_two_processes import free_port


@pytest.fixture
def ends(monkeypatch):
    """Reasons for which this process would have ended itself."""
    reasons: list[str] = []
    monkeypatch.setattr(PeerFailureMonitor, "end", lambda self: reasons.append(self.reason))
    monkeypatch.setattr("jaxinfer.multi_process.peer_failure._GRACE", 0.2)
    return reasons


REFUSED = [
    ({"process_id": 2}, "process_id is 2: with num_processes 2 it must be 0 to 1"),
    ({"process_id": 1, "kv_memory": "1GiB"}, "kv_memory is 1GiB there, but auto in process 0"),
    ({"process_id": 1, "decode_buckets": (3,)}, r"decode_buckets is \[3, 32\] there"),
    ({"process_id": 2, "num_processes": 3}, "num_processes is 3 there, but 2 in process 0"),
]


@pytest.mark.processes
def test_processes_with_other_settings_are_refused_and_both_sides_say_why():
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(lead, EngineConfig.of(coordinator=address, num_processes=2, connect_seconds=4.0))
        for given, words in REFUSED:
            with pytest.raises(ConfigError, match=f"process 0 at {address} refuses this process: {words}"):
                meet_leader({"coordinator": address, "connect_seconds": 10.0} | given)
        with pytest.raises(ConfigError, match=f"num_processes is 2, but processes 1 didn't join within 4 s: .*{REFUSED[-1][1]}"):
            leading.result()


def test_who_finds_no_leader_says_where(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"coordinator is {address}, where nobody listened for 0.5 s"):
        meet_leader({"coordinator": address, "process_id": 1, "connect_seconds": 0.5})


def test_two_leaders_on_one_address_are_told_apart():
    address = f"127.0.0.1:{free_port()}"
    first = LeaderChannel(address, 2, lambda greeting: None, 1.0)
    try:
        with pytest.raises(ConfigError, match=f"coordinator is {address}, where this process can't listen"):
            LeaderChannel(address, 2, lambda greeting: None, 1.0)
    finally:
        first.close()


def test_messages_come_in_order_until_the_leader_closes(ends):
    address = f"127.0.0.1:{free_port()}"
    leader = LeaderChannel(address, 3, lambda greeting: None, 10.0)
    followers = [FollowerChannel(address, {"process_id": i}, 10.0) for i in (1, 2)]
    streams = [follower.messages() for follower in followers]
    leader.wait_for_all()
    meeting = threading.Thread(target=leader.meet, args=(1,), kwargs={"is_last": True})
    meeting.start()
    followers[0].report(1)
    meeting.join(0.3)
    assert meeting.is_alive(), "it waits for the other too"
    followers[1].report(1)
    meeting.join(10)
    for number in range(50):
        leader.send(b"%d" % number)
    leader.close()
    for follower, stream in zip(followers, streams, strict=True):
        assert list(stream) == [b"", *(b"%d" % number for number in range(50))]
        follower.close()
    assert not ends


def test_who_has_come_to_another_plan_is_told_of(ends):
    address = f"127.0.0.1:{free_port()}"
    leader = LeaderChannel(address, 2, lambda greeting: None, 10.0)
    follower = FollowerChannel(address, {"process_id": 1}, 10.0)
    leader.wait_for_all()
    follower.report(1, "4 layers")
    with pytest.raises(ConfigError, match="process 1 has another plan: 4 layers; process 0 has 2 layers"):
        leader.meet(1, "2 layers")
    leader.close()
    follower.close()


def test_a_follower_that_is_gone_or_fails_is_told_of_and_ends_the_leader(ends):
    for error, words in ((None, r"process 1 of 2 \(ipv4:.*\) is gone"), ("CheckpointError: no file", "failed: CheckpointError: no file")):
        address = f"127.0.0.1:{free_port()}"
        leader = LeaderChannel(address, 2, lambda greeting: None, 10.0)
        follower = FollowerChannel(address, {"process_id": 1}, 10.0)
        leader.wait_for_all()
        if error is not None:
            follower.report(error=error)
        follower.close()
        with pytest.raises(ProcessLostError, match=words):
            leader.meet(1)
        with pytest.raises(ProcessLostError, match=words):
            leader.send(b"")
        leader.close()
    threading.Event().wait(0.5)
    assert len(ends) == 2


def test_a_leader_that_closes_before_all_are_ready_is_an_error_for_the_others(ends):
    address = f"127.0.0.1:{free_port()}"
    leader = LeaderChannel(address, 2, lambda greeting: None, 10.0)
    follower = FollowerChannel(address, {"process_id": 1}, 10.0)
    stream = follower.messages()
    leader.wait_for_all()
    leader.close()
    with pytest.raises(ProcessLostError, match=f"process 0 \\({address}\\) is gone"):
        next(stream)
    assert follower.monitor.is_lost.wait(10)
    follower.close()


def test_a_collective_that_fails_of_anothers_end_says_so_though_that_is_noticed_after_it(ends):
    monitor = PeerFailureMonitor()
    noticing = threading.Timer(0.2, monitor.report_lost, ["process 1 of 2 is gone"])
    noticing.start()
    with pytest.raises(ProcessLostError, match="process 1 of 2 is gone"), surface_peer_failure(monitor):
        raise jax.errors.JaxRuntimeError("Connection closed by peer")
    noticing.join()


def test_an_error_of_the_device_is_itself_where_nobody_is_gone(monkeypatch):
    monkeypatch.setattr("jaxinfer.multi_process.processes._NOTICED", 0.1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"), surface_peer_failure(PeerFailureMonitor()):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")


def test_a_process_that_waits_for_ever_is_ended_once_another_is_gone():
    program = """
import threading
from jaxinfer.multi_process import peer_failure
peer_failure._GRACE = 0.2
peer_failure.PeerFailureMonitor().report_lost("process 1 of 2 is gone")
threading.Event().wait()
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == PROCESS_LOST
    assert "process 1 of 2 is gone; this process ends too" in ended.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_processes": 2}, "num_processes is 2, but there is no coordinator"),
        ({"coordinator": "127.0.0.1:7000"}, "but num_processes is 1: give the number of processes too"),
        ({"num_processes": 2, "coordinator": "7000"}, "coordinator is '7000': give HOST:PORT"),
        ({"num_processes": 2, "coordinator": "a:0"}, "coordinator is 'a:0': give HOST:PORT"),
        ({"num_processes": 2, "process_id": 2, "coordinator": "a:1"}, "process_id is 2: with num_processes 2 it must be 0 to 1"),
        ({"num_processes": 0}, "num_processes is 0: it must be at least 1"),
        ({"num_processes": 2, "coordinator": "a:1", "embedding_model": "minilm"}, "embedding_model is minilm, which can't span processes"),
        ({"num_processes": 2, "coordinator": "a:1", "kv_host_memory": "1GiB"}, "kv_host_memory is 1GiB, which can't span processes"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.of(**settings)


def test_only_process_0_takes_requests():
    with pytest.raises(ConfigError, match="only process 0 takes requests: run `jaxinfer follow`"):
        lead(EngineConfig.of(coordinator="127.0.0.1:7000", num_processes=2, process_id=1))
