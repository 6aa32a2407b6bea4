import pytest

from jaxinfer.programs.buckets import QUERY_TILE, bucket_for, prefill_rows, query_tile


def test_the_smallest_bucket_that_holds_it():
    assert [bucket_for(size, (1, 8, 32)) for size in (1, 2, 8, 9, 32)] == [1, 8, 8, 32, 32]


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 32, 50, 128, 300, 512, 2048])
def test_a_programs_rows_start_at_its_tiles(num_tokens):
    assert num_tokens % query_tile(num_tokens) == 0
    assert QUERY_TILE % query_tile(num_tokens) == 0
    assert 1 <= prefill_rows(num_tokens) <= 8
    assert (prefill_rows(num_tokens) - 1) * QUERY_TILE < num_tokens
