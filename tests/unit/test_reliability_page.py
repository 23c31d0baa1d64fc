"""The page of promises names tests that exist."""

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


def test_each_promise_has_a_test_or_a_figure() -> None:
    """A line with neither proves nothing."""
    rows = [line.split("|")[1:-1] for line in PAGE.split("## Random")[0].splitlines() if line.startswith("| ")]
    promises = [row for row in rows if row[0].strip() != "promise"]
    assert len(promises) >= 20
    assert all(test.strip() or measured.strip() for _, test, measured in promises)
