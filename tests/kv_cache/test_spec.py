import pytest

from jaxinfer.architecture.known_models import model_shape
from jaxinfer.kv_cache.spec import LayerGroups, PageSpec, default_page_size
from jaxinfer.models.registry import read_config
from pallas_kernels.span import FULL_ATTENTION, Span

SPEC = PageSpec(num_layers=30, num_kv_heads=3, head_size=64, page_size=16, bytes_per_value=4)


def test_bytes():
    assert SPEC.token_bytes == 2 * 30 * 3 * 64 * 4
    assert SPEC.page_bytes == 16 * SPEC.token_bytes


def test_runs_for_tokens():
    assert [SPEC.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_pages_in_a_budget():
    assert SPEC.num_pages(10 * SPEC.page_bytes + 5) == 10
    assert SPEC.num_pages(2 * SPEC.page_bytes) == 2
    with pytest.raises(ValueError, match=f"a page of 16 tokens takes {SPEC.page_bytes} bytes .* give at least {2 * SPEC.page_bytes} bytes"):
        SPEC.num_pages(2 * SPEC.page_bytes - 1)


def test_a_device_has_its_heads_of_a_page_or_its_tokens_of_latents():
    assert SPEC.on_device(3, 3, 10).page_bytes == SPEC.page_bytes // 9
    assert SPEC.on_device(2, 4, 30).page_bytes == SPEC.page_bytes // 3 * 2, "the mesh's own heads"
    latents = PageSpec(61, 1, 576, 128, 2, num_sides=1)
    for num_devices, parts in ((1, 1), (2, 2), (8, 8), (16, 16), (32, 1), (3, 1)):  # of 32 devices each would have 4 tokens
        of_device = latents.on_device(num_devices, num_devices, 61)
        assert (of_device.num_parts, of_device.part_size) == (parts, 128 // parts)
        assert of_device.page_bytes == latents.page_bytes // parts
        assert of_device.blocks_for(129) == 2, "a run is as long on every device"
    with pytest.raises(ValueError, match=f"a page of 128 tokens takes {16 * 61 * 576 * 2} bytes"):
        latents.on_device(8, 8, 61).num_pages(1000)


def test_pages_of_latents_are_as_large_as_their_devices_need():
    kimi, llama = (read_config(model_shape(name)) for name in ("kimi-k2.5", "llama-3.1-8b"))
    assert [default_page_size(kimi, devices) for devices in ((1, 1), (8, 8), (2, 8), (2, 3))] == [16, 128, 128, 96]
    assert default_page_size(llama, (8, 8)) == 16


def test_layers_of_one_kind_are_one_group():
    groups = LayerGroups.of((FULL_ATTENTION,) * 30)
    assert (groups.size, groups.spans) == (30, (FULL_ATTENTION,))
    assert groups.places == tuple((0, layer) for layer in range(30))


def test_a_mix_is_cut_into_groups_of_one_size_that_waste_little():
    chunk = Span(chunk=8192)
    scout = LayerGroups.of(tuple(FULL_ATTENTION if layer % 4 == 3 else chunk for layer in range(48)))
    assert (scout.size, sorted(scout.spans, key=str)) == (12, [chunk] * 3 + [FULL_ATTENTION]) or scout.spans.count(chunk) == 3
    assert scout.spans.count(FULL_ATTENTION) == 1
    assert sorted(scout.places) == [(group, place) for group in range(4) for place in range(12)]
    assert all(scout.spans[group] == (FULL_ATTENTION if layer % 4 == 3 else chunk) for layer, (group, _) in enumerate(scout.places))


@pytest.mark.parametrize(
    ("num_layers", "every", "size", "num_groups"),
    [(26, 6, 4, 7), (34, 6, 5, 7), (62, 6, 10, 7), (24, 2, 12, 2)],  # Gemma 3 of 1, 4 and 27 billion parameters, GPT-OSS
)
def test_what_has_no_bound_wastes_nothing(num_layers, every, size, num_groups):
    window = Span(window=512)
    groups = LayerGroups.of(tuple(FULL_ATTENTION if layer % every == every - 1 else window for layer in range(num_layers)))
    assert (groups.size, len(groups.spans)) == (size, num_groups)
    assert groups.spans.count(FULL_ATTENTION) * size == num_layers // every
    assert len(set(groups.places)) == num_layers


def test_bytes_a_token_of_llama_4_scout():
    """48 layers of 8 KV heads of 128 in bfloat16, of which 12 attend to everything: what a long context costs."""
    spans = LayerGroups.of(tuple(FULL_ATTENTION if layer % 4 == 3 else Span(chunk=8192) for layer in range(48))).spans
    spec = PageSpec(12, 8, 128, 16, 2, spans)
    assert spec.token_bytes == 48 * 2 * 8 * 128 * 2
    assert spec.lasting_token_bytes == 12 * 2 * 8 * 128 * 2
    most = spec.max_pages(1_000_000, 4096)
    assert most * spec.page_bytes == pytest.approx(1_000_000 * spec.lasting_token_bytes + 36 * 2 * 8 * 128 * 2 * (8192 + 4096), rel=1e-3)
    latents = PageSpec(61, 1, 576, 16, 2, num_sides=1)
    assert latents.token_bytes == 61 * 576 * 2


@pytest.mark.parametrize("span", [Span(window=1), Span(window=9), Span(window=16), Span(chunk=1), Span(chunk=10), Span(chunk=16)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_most_runs_of_a_chunk_are_enough_wherever_it_starts(span, page_size):
    spec = PageSpec(1, 1, 1, page_size, 1, (span,))
    for num_tokens in (1, 2, 7, 32):
        needed = [spec.blocks_for(start + num_tokens) - spec.first_run(0, start) for start in range(200)]
        assert max(needed) <= spec.max_blocks(0, num_tokens)
    assert max(needed) >= spec.max_blocks(0, 32) - 1 - (span.chunk is not None) * (page_size > 1)
