"""The rule that thins matrices of cases out."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import cover, covering

pytest_plugins = ["pytester"]
AXES = ["ab", "cde", "fghij"]


@pytest.mark.parametrize(("strength", "most"), [(1, 5), (2, 18), (3, 30)])
def test_what_is_unmarked_has_every_value_with_every_other(strength, most):
    cases = covering(*AXES, strength=strength)
    assert [case.values for case in cases] == list(itertools.product(*AXES))
    unmarked = [case.values for case in cases if not case.marks]
    assert all(mark.name == "exhaustive" for case in cases for mark in case.marks)
    for axes in itertools.combinations(range(3), strength):
        assert {tuple(values[axis] for axis in axes) for values in unmarked} == set(itertools.product(*(AXES[axis] for axis in axes)))
    assert len(unmarked) <= most
    assert cases == covering(*AXES, strength=strength)


def test_of_rows_without_values_there_is_one():
    assert cover([(), ()]) == [0]
    assert cover([]) == []


def test_of_collected_tests_each_value_is_left_wherever_it_comes_from(pytester: pytest.Pytester):
    pytester.makeini("[pytest]\nmarkers = exhaustive: the rest\n")
    pytester.makeconftest("""
        import pytest
        from tests.covering import mark_exhaustive

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            mark_exhaustive(items)
    """)
    pytester.makepyfile("""
        import pytest

        @pytest.fixture(params=["h100", "h200"])
        def card(request):
            return request.param

        @pytest.mark.parametrize("batch", [1, 32, 128])
        @pytest.mark.parametrize(("heads", "options"), [(9, {}), (32, {"cap": 5, "span": 7}), (32, {"span": 7}), (8, {"span": 6})])
        def test_each(card, batch, heads, options): ...

        @pytest.mark.exhaustive
        @pytest.mark.parametrize("x", [1, 2])
        def test_long(x): ...

        def test_plain(): ...
    """)
    said = pytester.runpytest("-q", "--collect-only", "-m", "not exhaustive").stdout.str()
    assert [line.partition("::")[2] for line in said.splitlines() if "::" in line] == [
        "test_each[h100-32-options1-1]",
        "test_each[h100-8-options3-128]",
        "test_each[h200-9-options0-32]",
        "test_plain",
    ]
