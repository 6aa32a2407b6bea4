import pytest

from jaxinfer.kv_cache.spec import PageSpec

SPEC = PageSpec(num_layers=30, num_kv_heads=3, head_size=64, page_size=16, bytes_per_value=4)


def test_bytes():
    assert SPEC.token_bytes == 2 * 30 * 3 * 64 * 4
    assert SPEC.page_bytes == 16 * SPEC.token_bytes


def test_pages_for_tokens():
    assert [SPEC.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_pages_in_a_budget():
    assert SPEC.num_pages(10 * SPEC.page_bytes + 5) == 10
    assert SPEC.num_pages(2 * SPEC.page_bytes) == 2
    with pytest.raises(ValueError, match=f"a page of 16 tokens takes {SPEC.page_bytes} bytes .* give at least {2 * SPEC.page_bytes} bytes"):
        SPEC.num_pages(2 * SPEC.page_bytes - 1)
