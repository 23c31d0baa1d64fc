"""The page of promises names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
TESTS = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_each_test_that_proves_a_promise_exists(path: str, name: str) -> None:
    """A renamed test must be renamed on the page."""
    text = (ROOT / path).read_text()
    assert not name or f"def {name}(" in text


@pytest.mark.parametrize(("path", "name"), re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.split("## Random")[0]))
def test_each_promise_is_guarded_at_every_change(path: str, name: str) -> None:
    """What proves it is not of the lane `release`, which runs seldom."""
    tree = ast.parse((ROOT / path).read_text())
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign) and _is_marks(node)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks += map(ast.unparse, node.decorator_list)
    assert not [mark for mark in marks if re.search(r"pytest\.mark\.release(?!\))", f"{mark} ")], marks


def _is_marks(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) == "pytestmark"


def test_each_promise_has_a_test_or_a_figure() -> None:
    """A line with neither proves nothing."""
    rows = [line.split("|")[1:-1] for line in PAGE.split("## Random")[0].splitlines() if line.startswith("| ")]
    promises = [row for row in rows if row[0].strip() != "promise"]
    assert len(promises) >= 20
    assert all(test.strip() or measured.strip() for _, test, measured in promises)
