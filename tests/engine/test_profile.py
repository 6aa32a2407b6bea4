"""--profile: the trace can be read again, and tells programs and operations by their names."""

import gzip
import json
import subprocess
import sys

import jax
import pytest

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.programs import profile
from jaxinfer.programs.profile import Profile

RUN = """
import sys
from jaxinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_memory="512KiB", max_batch_size=8, decode_buckets=(8,), prefill_buckets=(32,), prefill_chunk_size=32, profile=sys.argv[2])
llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, ignore_eos=True))
"""


@pytest.mark.processes
def test_a_scripts_profile_is_written_at_its_end_and_opens(tiny_model_path, tmp_path):
    """In a process of its own: nobody closes the engine, and recording is the whole process's business."""
    subprocess.run([sys.executable, "-c", RUN, str(tiny_model_path), str(tmp_path)], check=True)
    (written,) = (tmp_path / "plugins/profile").iterdir()
    with gzip.open(written / "perfetto_trace.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"decode/8", "prefill/32"} <= names
    (plane,) = written.glob("*.xplane.pb")
    host = next(p for p in jax.profiler.ProfileData.from_file(str(plane)).planes if p.name == "/host:CPU")
    calls = [event for line in host.lines for event in line.events if event.name == "decode/8"]
    assert len(calls) == 7  # the first of 8 tokens is prefill's
    assert all(call.duration_ns > 0 for call in calls)


def test_it_records_so_many_seconds_from_the_first_work_on(monkeypatch, tmp_path):
    calls, now = [], [100.0]
    monkeypatch.setattr(profile.jax.profiler, "start_trace", lambda folder, **_: calls.append(("start", folder)))
    monkeypatch.setattr(profile.jax.profiler, "stop_trace", lambda: calls.append("stop"))
    monkeypatch.setattr(profile.time, "monotonic", lambda: now[0])
    recording = Profile(str(tmp_path / "new" / "folder"), 5.0)
    assert not calls
    for now[0] in (200.0, 204.9):
        recording.tick()
    assert calls == [("start", tmp_path / "new" / "folder")]
    for now[0] in (205.0, 300.0):
        recording.tick()
    recording.stop()
    assert calls[1:] == ["stop"], "once"


def test_nothing_is_written_without_work(monkeypatch, tmp_path):
    monkeypatch.setattr(profile.jax.profiler, "stop_trace", lambda: pytest.fail("nothing is being recorded"))
    Profile(str(tmp_path), 5.0).stop()
    assert not list(tmp_path.iterdir())


def test_what_can_not_be_is_said_in_a_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"profile is .*file.*give one that can be written"):
        Profile(str(tmp_path / "file"), 5.0)
    with pytest.raises(ConfigError, match="profile_seconds is 0"):
        EngineConfig.of(profile_seconds=0.0)
