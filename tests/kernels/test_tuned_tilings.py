"""Tilings that were measured on a card are taken there, and only there."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.mosaic import tuned_tilings as module
from pallas_kernels.mosaic.tuned_tilings import tuned_tiling
from pallas_kernels.paged_attention import mosaic_tiling
from sharding.mesh import make_mesh

HEADS = {"dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_size": 128, "page_size": 16}
ENTRIES = [
    {"kernel": "paged_attention", "shape": HEADS | {"batch": 1, "context": 512}, "tiling": {"tokens": 64, "stages": 4, "splits": 4}},
    {"kernel": "paged_attention", "shape": HEADS | {"batch": 32, "context": 4096}, "tiling": {"tokens": 128, "stages": 2, "splits": 1}},
    {
        "kernel": "write_and_attend",
        "shape": HEADS | {"batch": 32, "context": 4096},
        "tiling": {"tokens": 64, "stages": 6, "splits": 1, "warpgroups": 2, "writes": True},
    },
    {"kernel": "another", "shape": HEADS | {"batch": 4, "context": 4096}, "tiling": {"tokens": 1}},
]


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Has kernels compiled for a card of a name, of which, among others, ENTRIES are known."""
    (tmp_path / "nvidia-h200.json").write_text(json.dumps({"card": "NVIDIA H200", "entries": ENTRIES}))
    (tmp_path / "nvidia-h20.json").write_text(json.dumps({"card": "NVIDIA H20", "entries": []}))
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    module._entries.cache_clear()

    def on(kind, without_mesh="cpu"):
        device = None if kind is None else SimpleNamespace(device_kind=kind)
        monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: SimpleNamespace(abstract_device=device))
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=without_mesh)])

    yield on
    module._entries.cache_clear()


def test_the_nearest_shape_of_the_same_kind_and_kernel(on):
    for kind in ("NVIDIA H200", "NVIDIA H200 141GB HBM3e"):
        on(kind)
        assert tuned_tiling("paged_attention", HEADS | {"batch": 2, "context": 700}) == ENTRIES[0]["tiling"]
        assert tuned_tiling("paged_attention", HEADS | {"batch": 128, "context": 131072}) == ENTRIES[1]["tiling"]
        assert tuned_tiling("paged_attention", HEADS | {"batch": 2, "context": 700, "head_size": 64}) is None
        assert tuned_tiling("paged_attention", HEADS | {"tokens": 512}) is None
        assert tuned_tiling("grouped_matmul", HEADS | {"batch": 2, "context": 700}) is None


def test_other_cards_and_none(on):
    for kind in ("NVIDIA H20", "NVIDIA H100 80GB HBM3", None):
        on(kind)
        assert tuned_tiling("paged_attention", HEADS | {"batch": 1, "context": 512}) is None


def test_without_a_mesh_it_is_the_process_own_card(on):
    on(None, without_mesh="NVIDIA H200")
    assert tuned_tiling("paged_attention", HEADS | {"batch": 1, "context": 512}) == ENTRIES[0]["tiling"]
    on("NVIDIA H100 80GB HBM3", without_mesh="NVIDIA H200")
    assert tuned_tiling("paged_attention", HEADS | {"batch": 1, "context": 512}) is None, "compiled for another"


def test_jax_tells_the_card_while_it_traces():
    with jax.set_mesh(make_mesh((0,))):
        assert jax.sharding.get_abstract_mesh().abstract_device.device_kind == "cpu"


def test_paged_attention_takes_what_was_tuned(on):
    on("NVIDIA H200")
    sizes = (8, 4, 128, 16, 4096, jax.numpy.dtype("bfloat16"))
    assert mosaic_tiling.tiling_for(32, *sizes) == mosaic_tiling.DecodeTiling(128, 2, 1)
    on("NVIDIA H100")
    assert mosaic_tiling.tiling_for(32, *sizes).tokens == 64


def test_a_launch_writes_too_where_that_was_tuned_and_nowhere_else(on, monkeypatch):
    sizes = (8, 4, 128, 16, 4096, jax.numpy.dtype("bfloat16"))
    on("NVIDIA H200")
    assert mosaic_tiling.tiling_for(32, *sizes, is_written=False) == mosaic_tiling.DecodeTiling(64, 6, 1, writes=True)
    on("NVIDIA H100")
    assert not mosaic_tiling.tiling_for(32, *sizes, is_written=False).writes
    monkeypatch.setattr(mosaic_tiling, "tuned_tiling", lambda op, _: ENTRIES[1]["tiling"] if op == "paged_attention" else None)
    assert mosaic_tiling.tiling_for(32, *sizes, is_written=False) == mosaic_tiling.DecodeTiling(128, 2, 1), "as attention alone"
