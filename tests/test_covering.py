"""The rule that thins matrices of cases out."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import axes_of_layout, cover, covered, covered_layouts, covering

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


def test_layouts_are_told_by_what_they_do():
    assert axes_of_layout({}) == {"one device"}
    assert axes_of_layout({"prefill_devices": (0, 1), "decode_devices": (0, 1)}) == {"prefill tp=2", "decode tp=2"}
    assert axes_of_layout({"prefill_devices": (0,), "decode_devices": (1, 2)}) == {"two meshes", "decode tp=2"}
    assert axes_of_layout({"prefill_parallel": "tp=1,pp=3"}) == {"prefill pp=3", "decode pp=3"}
    split = {"prefill_parallel": "tp=2,ep=2", "decode_parallel": "tp=1,pp=2", "sequence_parallel": "on"}
    assert axes_of_layout(split) == {"two meshes", "prefill tp=2", "prefill ep=2", "decode pp=2", "sequence_parallel=on"}


def test_single_devices_of_stages_do_what_one_device_does():
    layouts = {"one": {}, "both": {"prefill_devices": (0, 1), "decode_devices": (0, 1)}, "stages": {"decode_parallel": "pp=2"}}
    assert [case.values[0] for case in covered_layouts(layouts) if not case.marks] == ["both", "stages"]


def test_of_named_cases_those_are_unmarked_that_have_everything_between_them():
    cases = covered({"one": {"a"}, "both": {"a", "b"}, "other": {"b"}, "third": {"c"}})
    assert [case.values[0] for case in cases if not case.marks] == ["both", "third"]


def test_of_rows_without_values_there_is_one():
    assert cover([(), ()]) == [0]
    assert cover([]) == []


@pytest.mark.parametrize("values_of", ["each_parameter", "name_of"])
def test_of_collected_tests_each_value_is_left_or_one_case_wherever_it_comes_from(pytester: pytest.Pytester, values_of: str):
    pytester.makeini("[pytest]\nmarkers = exhaustive: the rest\n")
    pytester.makeconftest(f"""
        import pytest
        from tests.covering import each_parameter, mark_exhaustive, name_of

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            mark_exhaustive(items, lambda item: {{name_of(item)}} if '{values_of}' == 'name_of' else each_parameter(item))
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

        @pytest.mark.parametrize("batch", [1, 2])
        def test_another(batch): ...
    """)
    said = pytester.runpytest("-q", "--collect-only", "-m", "not exhaustive").stdout.str()
    left = ["test_each[h100-32-options1-1]", "test_each[h100-8-options3-128]", "test_each[h200-9-options0-32]"]
    expected = {
        "each_parameter": [*left, "test_another[1]", "test_another[2]"],
        "name_of": ["test_each[h100-9-options0-1]", "test_another[1]"],
    }[values_of]
    assert [line.partition("::")[2] for line in said.splitlines() if "::" in line] == expected
