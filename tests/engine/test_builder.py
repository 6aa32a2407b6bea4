"""What an engine says of itself once it is ready: devices, programs, and where the bytes are."""

from __future__ import annotations

from tests import tiny_model
from tests.engine.test_token_equality import LAYOUTS

NUM_WEIGHTS = sum(tensor.size for tensor in tiny_model.tensors().values())
PAGE_BYTES = 2 * tiny_model.LAYERS * tiny_model.KV_HEADS * tiny_model.HEAD * 16 * 4


# On one device: two sizes of decode and two of prefill; what samples the first tokens of one row and of four, greedily or not; what scores prompts of
# either size; three that let a sequence join; and what lets others start from its prompt, one for each number of rows and one that copies pages.
NUM_PROGRAMS = 2 + 2 + 2 * 2 + 2 + 3 + 2 + 1
NUM_OF_ONE_SIZE = 1 + 1 + 2 * 1 + 1 + 3 + 1 + 1  # of each


def test_one_device_shares_weights_and_pages(llm):
    stats = llm.engine.stats
    assert stats.prefill_devices == stats.decode_devices
    assert len(stats.decode_devices) == 1
    assert stats.memory["shared weights"] == 4 * NUM_WEIGHTS
    assert stats.memory["shared KV pages"] == 512 * 2**10 == 64 * PAGE_BYTES
    assert stats.prefill_pages == stats.decode_pages == 63, "page 0 is nobody's"
    assert stats.memory["shared token counts"] == (33 + 4) * tiny_model.VOCAB * 5
    assert set(stats.memory) == {f"shared {what}" for what in ("weights", "KV pages", "token counts", "temporaries")}
    assert stats.num_programs == NUM_PROGRAMS
    assert stats.load_seconds > 0
    assert stats.compile_seconds > 0


def test_two_meshes_hold_their_own(llms):
    stats = llms(**LAYOUTS["two devices"]).engine.stats
    assert not set(stats.prefill_devices) & set(stats.decode_devices)
    for mesh in ("prefill", "decode"):
        assert stats.memory[f"{mesh} weights"] == 4 * NUM_WEIGHTS
        assert stats.memory[f"{mesh} KV pages"] == 512 * 2**10
    assert stats.num_programs == NUM_OF_ONE_SIZE + 8, "that move pages"


def test_a_mesh_of_two_holds_half_of_each_on_a_device(llms):
    stats = llms(**LAYOUTS["two meshes of two"]).engine.stats
    norms = (2 * tiny_model.LAYERS + 1) * tiny_model.HIDDEN  # the only weights that every device holds whole
    assert stats.memory["decode weights"] == 4 * ((NUM_WEIGHTS - norms) // 2 + norms)
    assert stats.memory["decode KV pages"] == 512 * 2**10
    assert stats.decode_pages == 127, "each device holds a part of every page"
