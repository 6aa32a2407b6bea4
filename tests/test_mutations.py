"""The list of mutations: each can be put into the code as it is, and names tests that there are. `make test-mutations` runs them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations import LIST, ROOT, Mutation, read

PACKAGES = {"jaxinfer", "pallas_kernels", "sharding", "checkpoints", "server"}
MUTATIONS = read()


def test_the_list_has_faults_of_every_package() -> None:
    assert len(MUTATIONS) >= 40
    assert len(MUTATIONS) == LIST.read_text(encoding="utf-8").count("\n## ")  # none that could not be read
    assert [m.number for m in MUTATIONS] == list(range(1, len(MUTATIONS) + 1))
    assert {Path(m.path).parts[0] for m in MUTATIONS} == PACKAGES


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: str(m.number))
def test_a_mutation_makes_another_program(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(mutation.applied_to(text))) != ast.dump(ast.parse(text))
    assert all((ROOT / test).exists() for test in mutation.tests)


def test_a_patch_whose_text_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 times"):
        MUTATIONS[0].applied_to("")
