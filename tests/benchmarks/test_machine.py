from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import machine
from benchmarks.machine import BackgroundLoad, machine_slug, peak_memory


@pytest.mark.parametrize(
    ("about", "slug"),
    [
        ({"cpu": "AMD EPYC", "cores": 2}, "amd-epyc-2-cores"),
        ({"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cores": 8}, "intel-xeon-8-cores"),
        ({"cpu": "AMD EPYC 9654 96-Core Processor", "cores": 4, "accelerator": "NVIDIA H200"}, "amd-epyc-9654-96-core-4-cores-nvidia-h200"),
    ],
)
def test_a_machine_has_a_name_for_files(about: dict[str, object], slug: str) -> None:
    assert machine_slug(about) == slug


def test_what_others_used_is_what_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0, "machine": 1000.0, "own": 50.0}
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(machine, "_machine_seconds", lambda: clock["machine"])
    monkeypatch.setattr(BackgroundLoad, "_own_seconds", lambda self: clock["own"])
    others = BackgroundLoad()

    def stretch(seconds: float, every: float, own: float) -> None:
        others.look()
        clock.update(now=clock["now"] + seconds, machine=clock["machine"] + every, own=clock["own"] + own)
        others.keep()

    stretch(10, 15, 12)
    stretch(2, 2, 3)  # what a child used before may be told only now: never less than nothing
    stretch(0.5, 5, 0)  # too short to tell
    clock.update(now=clock["now"] + 100, machine=clock["machine"] + 100)  # between two stretches
    stretch(4, 4, 2)
    assert others.samples == pytest.approx([0.3, 0.0, 0.5])


def test_a_child_counts_as_ours() -> None:
    others = BackgroundLoad()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = others._own_seconds()
        used, deadline = 0.0, time.monotonic() + 20
        while used < 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
            used = others._own_seconds() - before
        assert used >= 0.2
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(not psutil.LINUX, reason="reads /proc")
def test_peak_memory_is_of_the_whole_family_and_does_not_fall() -> None:
    code = "import subprocess, sys; a = bytearray(60 << 20); del a; print(flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {code!r}]); p.wait()"
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = peak_memory(process.pid)
        assert found is not None and found > 60
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def test_a_process_that_is_gone_has_no_peak() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert peak_memory(child.pid) is None
