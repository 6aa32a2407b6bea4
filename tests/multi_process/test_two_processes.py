"""Two real processes of four CPU devices each, as one engine: the tokens of one device, and an error in seconds when one dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import QUICK_COMPILATION, TINY
from tests.engine.workload import tokens_of, workload
from tests.multi_process.leader import FEW

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SECONDS = 240  # that anything here may take where the machine is busy; on a quiet one all of it takes 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_processes_give_the_tokens_of_one_and_end_when_one_is_killed(tiny_model_path, llms, tmp_path):
    """Both roles are split over both processes, on devices of their own, so each hand-off moves pages in both, and those that go over
    the network too. Prefix cache and preemption as well."""
    coordinator, out, log = f"127.0.0.1:{free_port()}", tmp_path / "out.json", tmp_path / "log"
    settings = TINY | {
        "kv_memory": "256KiB",  # of which 45 tokens take more than there are
        "decode_buckets": (32,),
        "prefill_buckets": (128,),
        "model": str(tiny_model_path),
        "coordinator": coordinator,
        "num_processes": 2,
        "cpu_devices": 4,
        "prefill_devices": (0, 4),  # a KV head in each process: neither can read a page without the other
        "decode_devices": (2, 3, 6, 7),  # the two heads are copied, a device each
        "kv_peers": True,
        "connect_seconds": float(SECONDS),
        "out": str(out),
    }
    follow = ["follow", "--coordinator", coordinator, "--process-id", "1", "--connect-seconds", str(SECONDS)]
    with log.open("wb") as written:
        processes = [
            subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=os.environ | QUICK_COMPILATION, stdout=written, stderr=written)
            for command in (["tests.multi_process.leader", json.dumps(settings)], ["server.cli", *follow])
        ]
        leader, follower = processes
        try:
            deadline = time.monotonic() + SECONDS
            while "answered" not in log.read_text(errors="replace"):
                assert leader.poll() is None and follower.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
                time.sleep(0.1)
            follower.kill()
            assert leader.wait(30) != 0
        finally:
            for process in processes:
                process.kill()
                process.wait()
    told = log.read_text(errors="replace")
    assert "process 1 of 2" in told and "is gone: start all of them again; this process ends too" in told
    # The leader ends of a collective that fails, or in one that waits for ever: test_meeting.py has each by itself.

    # What one device gives in a batch is what it gives each alone: tests/engine/test_token_equality.py.
    llm, (prompts, params) = llms(), workload()
    few = [replace(p, max_tokens=FEW) for p in params]
    found, expected = json.loads(out.read_text()), tokens_of(llm.generate(prompts[:15], few[:15]))
    assert found["tokens"] == expected
    assert found["again"] == expected
    assert found["handed_over"] == expected[:6]
    assert found["long"] == tokens_of(llm.generate([prompt[:15] for prompt in prompts], [replace(p, max_tokens=45) for p in params]))
    assert found["siblings"] == tokens_of(llm.generate(prompts[:9], [replace(p, n=3) for p in few[:9]]))
    np.testing.assert_allclose(found["prompt_logprobs"], llm.logprobs(prompts[13])[1:], atol=1e-4)
    assert found["num_preemptions"] > 4
    assert found["num_pages_moved"] > 80
    assert found["num_cached_tokens"] > 400
    assert found["num_compilations_after_ready"] == 0
    assert "can't span processes" in found["logits"]
