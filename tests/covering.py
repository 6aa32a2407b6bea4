"""Of a matrix of cases, those that a run takes in which time counts: so many that each value of each axis is in one of them. The rule chooses, nobody
by hand, and always the same ones. All others are marked `exhaustive`, which `make test` and CI leave out: `-m exhaustive` runs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any], strength: int = 1) -> list[Any]:
    """All combinations of the axes' values, in the order of `itertools.product`, for `pytest.mark.parametrize("a, b", covering(a, b))`.

    Unmarked are those of `cover`, the others `exhaustive`. Two axes of 3 and 5 values: 5 of 15.

    Args:
      axes: values, of any type; of each at least one.
      strength: how many axes' values are to meet: 1, each value once; 2, each pair of values once.
    """
    if not 1 <= strength <= len(axes):
        raise ValueError(f"strength {strength} of {len(axes)} axes")
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    needed = set(cover([list(itertools.combinations(enumerate(place), strength)) for place in places]))
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, place, strict=True)), marks=() if index in needed else pytest.mark.exhaustive
        )
        for index, place in enumerate(places)
    ]


def covered(cases: Mapping[str, Collection[Hashable]]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize("name", covered(cases))`: of all names those unmarked that have between them whatever any of them has."""
    needed = set(cover(list(cases.values())))
    return [pytest.param(name, marks=() if index in needed else pytest.mark.exhaustive) for index, name in enumerate(cases)]


def axes_of_layout(settings: Mapping[str, Any]) -> frozenset[str]:
    """What an engine's settings choose: of each role its degrees over 1, such as "prefill tp=2"; "two meshes"; of all other settings each with its
    value. On one device, and nothing chosen: "one device"."""
    roles = ("prefill", "decode")
    of_roles = {f"{role}_{kind}" for role in roles for kind in ("devices", "parallel")}
    found = {f"{name}={value}" for name, value in settings.items() if name not in of_roles}
    degrees = {}
    for role in roles:
        layout = settings.get(f"{role}_parallel") or f"tp={len(settings.get(f'{role}_devices', (0,)))}"
        degrees[role] = [part for part in layout.split(",") if not part.endswith("=1")]
    if "decode_parallel" not in settings and settings.get("decode_devices", ()) == settings.get("prefill_devices", ()):
        degrees["decode"] = degrees["prefill"]
    else:
        found.add("two meshes")
    return frozenset(found | {f"{role} {degree}" for role, of_role in degrees.items() for degree in of_role} or {"one device"})


def covered_layouts(layouts: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The same for engines' settings by name. A role whose stages are single devices does what one device does."""
    return covered({name: axes_of_layout(settings) | _single_devices(settings) for name, settings in layouts.items()})


def _single_devices(settings: Mapping[str, Any]) -> set[str]:
    degrees = [settings.get(f"{role}_parallel") or f"tp={len(settings.get(f'{role}_devices', (0,)))}" for role in ("prefill", "decode")]
    return {"one device"} if any({part for part in one.split(",") if part.startswith("tp=")} <= {"tp=1"} for one in degrees) else set()


def mark_exhaustive(items: Sequence[pytest.Item], values_of: Callable[[pytest.Item], Collection[Hashable]]) -> None:
    """The same for collected tests: unmarked stay so many that each value of each test is in one of them. What has the mark already covers nothing.
    For a hook `pytest_collection_modifyitems` that is tried first: before `-m` is."""
    unmarked = [item for item in items if item.get_closest_marker("exhaustive") is None]
    needed = set(cover([values_of(item) for item in unmarked]))
    for index, item in enumerate(unmarked):
        if index not in needed:
            item.add_marker(pytest.mark.exhaustive)


def name_of(item: pytest.Item) -> str:
    """Of a test in its file, the same with all parameters."""
    return item.nodeid.partition("[")[0]


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """By their names, wherever they come from, decorators or fixtures."""
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec else {}


def cover(rows: Sequence[Collection[Hashable]]) -> list[int]:
    """Indices, ascending, of rows that have between them all that any row has, and at least one row. Each time the first of the rows with the most
    that is still missing is taken: no fewest, but few."""
    missing, taken = {each for row in rows for each in row}, []
    while missing or (rows and not taken):
        best = max(range(len(rows)), key=lambda index: len(missing.intersection(rows[index])))
        taken.append(best)
        missing.difference_update(rows[best])
    return sorted(taken)


def each_parameter(item: pytest.Item) -> set[Hashable]:
    """Its test, and of each of the test's parameters the value; of one that is a dictionary, as options are, each key's. Equal values are one,
    whichever rows they stand in: of (32, 8, 128) and (32, 8, 96) the second has only one more."""
    found: set[Hashable] = {name_of(item)}
    for name, value in parameters_of(item).items():
        parts = {f"{name}[{key!r}]": part for key, part in value.items()} if isinstance(value, dict) and value else {name: value}
        found.update((name_of(item), key, repr(part)) for key, part in parts.items())  # as text, for a dictionary can't be hashed
    return found
