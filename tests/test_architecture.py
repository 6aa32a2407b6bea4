"""The house keeps its rules (docs/architecture.md), and each rule catches what breaks it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests import architecture_rules as rules

ROOT = Path(__file__).resolve().parent.parent
MODULES = rules.read(ROOT, rules.PACKAGES)
ALL = rules.read(ROOT, (*rules.PACKAGES, "benchmarks", "examples", "tests"))
SHIPPED = {name: m for name, m in ALL.items() if not m.path.startswith("tests/")}


@pytest.mark.parametrize(
    "rule",
    [
        rules.wrong_arrows,
        rules.upward_imports,
        rules.import_cycles,
        rules.ways_to_jax,
        rules.hidden_imports,
        rules.global_statements,
        rules.unannotated_functions,
        rules.long_files,
        rules.retired_names,
        rules.repeated_class_names,
    ],
)
def test_the_code_keeps_the_rule(rule: Callable[[rules.Modules], list[str]]) -> None:
    breaches = rule(MODULES)
    assert not breaches, "\n".join(breaches)


def test_benchmarks_and_examples_keep_the_rules_of_single_files() -> None:
    breaches = rules.global_statements(SHIPPED) + rules.unannotated_functions(SHIPPED) + rules.long_files(SHIPPED)
    breaches += rules.long_files({n: m for n, m in SHIPPED.items() if m.path.startswith("examples/")}, limit=40)
    assert not breaches, "\n".join(breaches)


def test_every_kernel_folder_is_complete() -> None:
    assert not rules.incomplete_kernels([m.path for m in MODULES.values()])


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert not rules.vague_names([m.path for m in ALL.values()])


def test_the_documented_tree_has_every_package() -> None:
    assert not rules.unmentioned_packages(MODULES, (ROOT / "docs/architecture.md").read_text(encoding="utf-8"))


def test_the_wheel_has_every_package_and_no_tests() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(m.name for m in MODULES.values() if m.path.endswith("__init__.py"))


def test_every_folder_with_code_is_a_package() -> None:
    folders = {Path(m.path).parent for m in MODULES.values()}
    assert [str(f) for f in sorted(folders) if not (ROOT / f / "__init__.py").exists()] == []


def test_every_pattern_of_the_host_half_names_a_file() -> None:
    """A file that moves must not leave the no-JAX list unnoticed."""
    paths = [m.path for m in MODULES.values()]
    assert [p for p in rules.JAX_FREE if not any(fnmatch(path, p) for path in paths)] == []


def test_the_rules_name_only_what_there_is() -> None:
    """A rule about a package that has gone, or is not there yet, would hold of nothing."""
    named = {name for members in rules.LAYERS for name in members}
    named |= {name for twins in rules.TWINS for name in twins}
    named |= {*rules.ARROWS, *(name for allowed in rules.ARROWS.values() for name in allowed)}
    assert sorted(named - MODULES.keys()) == []
    assert sorted(set(rules.JAX_FREE_EXCEPT) - {m.path for m in MODULES.values()}) == []


BAD = [
    (rules.wrong_arrows, {"sharding/mesh.py": "import jaxinfer.config\n", "jaxinfer/config.py": ""}),
    (rules.wrong_arrows, {"checkpoints/loader.py": "from jaxinfer import config\n", "jaxinfer/__init__.py": "", "jaxinfer/config.py": ""}),
    (rules.wrong_arrows, {"checkpoints/loader.py": "from pallas_kernels import dispatch\n", "pallas_kernels/dispatch.py": ""}),
    (rules.wrong_arrows, {"server/metrics.py": "from checkpoints.hub import fetch\n", "checkpoints/hub.py": ""}),
    (rules.wrong_arrows, {"jaxinfer/engine.py": "from tests import conftest\n"}),
    (rules.upward_imports, {"jaxinfer/layers/mlp.py": "from jaxinfer.models import llama\n", "jaxinfer/models/llama.py": ""}),
    (rules.upward_imports, {"jaxinfer/prefill/worker.py": "from jaxinfer.decode.batch import B\n", "jaxinfer/decode/batch.py": ""}),
    (rules.upward_imports, {"jaxinfer/prefill/worker.py": "from ..decode import batch\n", "jaxinfer/decode/batch.py": ""}),
    (rules.upward_imports, {"jaxinfer/config.py": "from .engine import Engine\n", "jaxinfer/engine.py": ""}),
    (rules.upward_imports, {"jaxinfer/somewhere.py": ""}),
    (
        rules.import_cycles,
        {"sharding/a.py": "import sharding.b\n", "sharding/b.py": "from sharding.c import f\n", "sharding/c.py": "from . import a\n"},
    ),
    (rules.ways_to_jax, {"jaxinfer/request.py": "import jax.numpy as jnp\n"}),
    (
        rules.ways_to_jax,
        {"jaxinfer/decode/batch.py": "from jaxinfer.kv_cache import pages\n", "jaxinfer/kv_cache/pages.py": "from flax import nnx\n"},
    ),
    (
        rules.ways_to_jax,
        {
            "jaxinfer/decode/batch.py": "import jaxinfer.weights.load\n",
            "jaxinfer/weights/__init__.py": "import jax\n",
            "jaxinfer/weights/load.py": "",
        },
    ),
    (
        rules.ways_to_jax,
        {
            "server/openai/app.py": "from server import local_backend\n",
            "server/local_backend.py": "from jaxinfer.engine import E\n",
            "jaxinfer/engine.py": "import jax\n",
        },
    ),
    (rules.ways_to_jax, {"server/local_backend.py": "import jax\n"}),
    (rules.hidden_imports, {"sharding/mesh.py": "def f() -> None:\n    import os\n"}),
    (rules.hidden_imports, {"sharding/mesh.py": "if TYPE_CHECKING:\n    import os\n"}),
    (rules.hidden_imports, {"sharding/mesh.py": "import importlib\nm = importlib.import_module('os')\n"}),
    (rules.global_statements, {"sharding/mesh.py": "def f() -> None:\n    global x\n    x = 1\n"}),
    (rules.unannotated_functions, {"sharding/mesh.py": "def f(x) -> None: ...\n"}),
    (rules.unannotated_functions, {"sharding/mesh.py": "def f(x: int): ...\n"}),
    (rules.unannotated_functions, {"sharding/mesh.py": "class C:\n    def f(self, *args, y: int) -> None: ...\n"}),
    (rules.unannotated_functions, {"sharding/mesh.py": "class C:\n    @staticmethod\n    def f(x) -> None: ...\n"}),
    (rules.long_files, {"sharding/mesh.py": "\n" * 401}),
    (rules.retired_names, {"jaxinfer/servable.py": ""}),
    (rules.retired_names, {"jaxinfer/layers/attention.py": "class How: ...\n"}),
    (rules.retired_names, {"jaxinfer/layers/moe.py": "def why_not() -> None: ...\n"}),
    (rules.retired_names, {"jaxinfer/kv_cache/spec.py": "def f(keep_free: int) -> None: ...\n"}),
    (rules.retired_names, {"jaxinfer/engine.py": "class E:\n    def __init__(self) -> None:\n        self.plain_forward = 1\n"}),
    (rules.repeated_class_names, {"jaxinfer/config.py": "class Call: ...\n", "server/usage.py": "class _Call: ...\n"}),
    (rules.repeated_class_names, {"jaxinfer/config.py": "class Call: ...\n", "server/usage.py": "Call = tuple[int, str]\n"}),
]


@pytest.mark.parametrize(("rule", "sources"), BAD)
def test_the_rule_catches_a_breach(rule: Callable[[rules.Modules], list[str]], sources: dict[str, str]) -> None:
    assert len(rule(rules.modules_of(sources))) == 1


GOOD = {
    "jaxinfer/__init__.py": "def __getattr__(name: str) -> object:\n    from jaxinfer.llm import LLM\n    return LLM\n",
    "jaxinfer/llm.py": "import jax\nfrom jaxinfer.engine import Engine\n",
    "jaxinfer/engine.py": "from jaxinfer.prefill import worker\nfrom jaxinfer.decode import worker as decode_worker\nfrom jaxinfer import config\n",
    "jaxinfer/prefill/__init__.py": "",
    "jaxinfer/prefill/worker.py": "import jax\nfrom checkpoints.loader import load\n",
    "jaxinfer/decode/__init__.py": "",
    "jaxinfer/decode/worker.py": "from pallas_kernels import dispatch\n",
    "jaxinfer/config.py": "try:\n    import uvloop\nexcept ImportError:\n    uvloop = None\ndef _f(x): ...\nclass C:\n    def g(self) -> None:\n        def inner(y): ...\n",
    "checkpoints/loader.py": "import numpy\n",
    "pallas_kernels/dispatch.py": "import jax\n",
    "server/cli/serve.py": "def serve() -> None:\n    from jaxinfer.llm import LLM\n    from checkpoints.hub import fetch\n",
    "server/local_backend.py": "from jaxinfer.engine import Engine\n",
    "checkpoints/hub.py": "",
}


def test_the_rules_let_good_code_pass() -> None:
    modules = rules.modules_of(GOOD)
    every = (rules.wrong_arrows, rules.upward_imports, rules.import_cycles, rules.ways_to_jax, rules.hidden_imports)
    for rule in (*every, rules.global_statements, rules.unannotated_functions, rules.long_files):
        assert rule(modules) == []


def test_rules_over_names_catch_a_breach() -> None:
    assert rules.incomplete_kernels(
        ["pallas_kernels/attention/__init__.py", "pallas_kernels/attention/op.py", "pallas_kernels/attention/cases.py"]
    ) == ["pallas_kernels/attention/ lacks reference.py"]
    assert len(rules.vague_names(["server/utils.py", "server/misc/page.py", "server/openai/app.py"])) == 2
    assert rules.unmentioned_packages(rules.modules_of({"sharding/__init__.py": ""}), "jaxinfer/  the engine") == [
        "sharding is not in the tree"
    ]


def test_what_compiles_for_gpus_is_where_it_is_looked_for() -> None:
    """`make test-aot` collects one folder: all of them take half a minute, for each kind of card."""
    marked = [
        m.path
        for m in ALL.values()
        if m.path.startswith("tests/") and "pytest.mark." + "aot" in (ROOT / m.path).read_text(encoding="utf-8")
    ]
    assert marked
    assert all(path.startswith("tests/aot/") for path in marked)
