"""Programs that are shipped: a start with them compiles nothing; what was changed is refused by name; what differs is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.programs.bundle import BundleError, read_bundle, read_bundle_key, write_bundle
from jaxinfer.programs.private_folder import PrivateFolder

KEY = bytes(range(32))
ABOUT = {"jax": "0.10", "--kv-memory": "512KiB"}
FLAGS = ["--kv-memory=512KiB", "--max-batch-size=4", "--decode-buckets=4", "--prefill-buckets=32", "--prefill-chunk-size=32"]
START = """
import json, logging, sys
logging.basicConfig(level="WARNING", stream=sys.stderr)
from jaxinfer import LLM, SamplingParams
from jaxinfer.programs.compilation import TOTAL
settings = dict(kv_memory="512KiB", max_batch_size=4, decode_buckets=(4,), prefill_buckets=(32,), prefill_chunk_size=32)
with LLM(sys.argv[1], programs=sys.argv[2], programs_key=sys.argv[3], **settings | json.loads(sys.argv[4])) as llm:
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
print(TOTAL.num_compilations)
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    cache = PrivateFolder.at(tmp_path / "cache", tmp_path / "key")
    for name in ("a.origin", "b.executable"):
        cache.write(name, name.encode() * 100)
    write_bundle(cache, tmp_path / "bundle", KEY, ABOUT)
    return tmp_path / "bundle"


def test_what_was_written_is_read_and_installed(made: Path, tmp_path: Path) -> None:
    bundle = read_bundle(made, KEY)
    assert dict(bundle.about) == ABOUT
    assert bundle.contents == {"a.origin": b"a.origin" * 100, "b.executable": b"b.executable" * 100}
    other = PrivateFolder.at(tmp_path / "other", tmp_path / "other key")
    other.write("a.origin", b"of its own")
    bundle.install(other)
    assert other.read("a.origin") == b"of its own"
    assert other.read("b.executable") == b"b.executable" * 100
    assert bundle.differences(ABOUT) == []
    assert bundle.differences({"jax": "0.11", "XLA_FLAGS": "--x"}) == [
        "--kv-memory is not set, they were compiled for 512KiB",
        "XLA_FLAGS is --x, they were compiled for none",
        "jax is 0.11, they were compiled for 0.10",
    ]


@pytest.mark.parametrize("name", ["a.origin", "b.executable", "manifest.sealed"])
def test_a_file_that_was_changed_is_refused(made: Path, name: str) -> None:
    """Whichever byte it is; and one that is missing, or stands for another."""
    whole = (made / name).read_bytes()
    for place in range(0, len(whole), 7):
        (made / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BundleError, match=name):
            read_bundle(made, KEY)
    (made / name).write_bytes((made / "b.executable" if name != "b.executable" else made / "a.origin").read_bytes())
    with pytest.raises(BundleError, match=name):
        read_bundle(made, KEY)
    (made / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing"):
        read_bundle(made, KEY)


def test_another_bundles_file_and_another_key_are_refused(made: Path, tmp_path: Path) -> None:
    cache = PrivateFolder.at(tmp_path / "second", tmp_path / "key")
    cache.write("a.origin", b"other content")
    write_bundle(cache, tmp_path / "two", KEY, ABOUT)
    (made / "a.origin").write_bytes((tmp_path / "two" / "a.origin").read_bytes())
    with pytest.raises(BundleError, match=r"a\.origin is another bundle's"):
        read_bundle(made, KEY)
    with pytest.raises(BundleError, match="another key"):
        read_bundle(tmp_path / "two", bytes(32))
    with pytest.raises(BundleError, match="not empty"):
        write_bundle(cache, made, KEY, ABOUT)
    (tmp_path / "short").write_bytes(b"secret")
    with pytest.raises(BundleError, match="6 bytes"):
        read_bundle_key(tmp_path / "short")


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")}
    environment |= {"XDG_CACHE_HOME": str(home), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.processes
def test_a_start_with_shipped_programs_compiles_nothing(tiny_model_path: Path, tmp_path: Path) -> None:
    """In another process, for a user whose cache is empty. Other settings compile what they need, and are told."""
    key, folder = tmp_path / "key", tmp_path / "programs"
    key.write_bytes(KEY)
    command = "from server.cli import main; main()"
    made = run(tmp_path / "a", "-c", command, "compile", f"--model={tiny_model_path}", f"--programs-key={key}", f"-o={folder}", *FLAGS)
    assert made.returncode == 0, made.stderr
    started = run(tmp_path / "b", "-c", START, str(tiny_model_path), str(folder), str(key), "{}")
    assert started.returncode == 0, started.stderr
    assert started.stdout.split()[-1] == "0"
    assert "compiled anew" not in started.stderr
    other = run(tmp_path / "c", "-c", START, str(tiny_model_path), str(folder), str(key), json.dumps({"kv_memory": "1MiB"}))
    assert other.returncode == 0, other.stderr
    assert int(other.stdout.split()[-1]) > 0
    assert "--kv-memory is 1MiB, they were compiled for 512KiB" in other.stderr
    victim = max(folder.glob("*.executable"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    refused = run(tmp_path / "d", "-c", START, str(tiny_model_path), str(folder), str(key), "{}")
    assert refused.returncode != 0
    assert f"{victim.name} was changed" in refused.stderr.splitlines()[-1]
