"""README and docs/ are consistent: links and named files exist, each page says first what it is and how to use it.
Prose is narrow there, and in docstrings and comments of every package."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
TOP = ("jaxinfer", "pallas_kernels", "sharding", "checkpoints", "server", "tests", "benchmarks", "docs", "deploy", "examples")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOP)})/[\w./*-]*[\w*]")  # a file, a folder or a pattern, as code spans name them
COMMAND = re.compile(r"`(?:[A-Z_]+=\S+ )*(?:jaxinfer|make|pip|python|\.venv\S*|curl|docker) ?[^`]*`")
LONGEST = 120
SOURCES = sorted(
    path
    for top in ("jaxinfer", "pallas_kernels", "sharding", "checkpoints", "server", "benchmarks", "examples")
    for path in (ROOT / top).rglob("*.py")
)
PRAGMA = re.compile(r"#\s*(noqa|type:|fmt:|pragma)")  # such a comment must stay on its line


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def absent_files(page: Path) -> list[str]:
    spans = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    paths = {path for span in spans for path in PATH.findall(span)}
    return sorted(path for path in paths if "NAME" not in path and not any(ROOT.glob(path)))


def long_lines(page: Path) -> list[int]:
    """Numbers of lines of prose, as opposed to code and tables, that are longer than `LONGEST` characters."""
    lines, in_code = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if len(line) > LONGEST and not in_code and not line.startswith(("|", "![")):
            lines.append(number)
    return lines


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_links_to_and_names_is_there(page: Path) -> None:
    assert broken_links(page) == []
    assert absent_files(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_prose_is_narrow(page: Path) -> None:
    assert long_lines(page) == []


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_a_page_begins_with_what_it_is_and_a_command(page: Path) -> None:
    title, *rest = [line for line in page.read_text(encoding="utf-8").splitlines() if line]
    assert title.startswith("# ")
    assert COMMAND.search("\n".join(rest[:3])), "the first three lines say what this is, when to use it, and a command"


def test_readme_and_architecture_are_short() -> None:
    lengths = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in ("README.md", "docs/architecture.md")}
    assert lengths["README.md"] <= 160 and lengths["docs/architecture.md"] <= 150
    assert [
        name(page)
        for page in DOCS
        if page.parent.name == "decisions" and page.name != "README.md" and len(page.read_text().splitlines()) > 60
    ] == []


def test_every_table_row_of_the_readme_is_in_a_table() -> None:
    """A blank line within a table ends it: the rows below become a paragraph of bars."""
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [token.content for token in tokens if token.type == "inline" and token.content.startswith("|")] == []


def test_every_page_is_linked_from_the_architecture_or_the_list_of_decisions() -> None:
    lists = [ROOT / "docs/architecture.md", ROOT / "docs/decisions/README.md"]
    linked = {(page.parent / link).resolve() for page in lists for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text())}
    assert [name(page) for page in DOCS if page not in {*linked, *lists[:1]}] == []


def long_lines_of_code(source: str) -> list[int]:
    """Numbers of lines of docstrings, and of lines with a comment, that are longer than `LONGEST` characters."""
    prose: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not PRAGMA.match(token.string):
            prose.add(token.start[0])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.splitlines()
    return [number for number in sorted(prose) if len(lines[number - 1]) > LONGEST]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_prose_in_code_is_narrow(path: Path) -> None:
    assert long_lines_of_code(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (f'"""{"a" * 118}"""\n', [1]),
        (f"x = 1\ny = 2  # {'a' * 120}\n", [2]),
        (f'class C:\n    x: int\n    """{"a" * 120}"""\n', [3]),
        (f"x = '{'a' * 120}'\n", []),
        (f"x = '{'a' * 120}'  # noqa: E501\n", []),
    ],
)
def test_wide_prose_in_code_is_found(source: str, lines: list[int]) -> None:
    assert long_lines_of_code(source) == lines
