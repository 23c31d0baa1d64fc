"""Cells of docs/comparison.md that a machine looks up in the packages of the peers."""

import pytest

from tests.bench.peers.facts import FACTS, Fact, installed
from tests.bench.processes import ROOT

TABLE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8").split("## Feature by feature")[1]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("|")]


def cell(fact: Fact) -> str:
    """Return the cell of the page."""
    column = ROWS[0].index(fact.column)
    (row,) = [row for row in ROWS if row[0] == fact.row]
    return row[column]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_the_page_says_what_is_looked_up(fact):
    """A cell that is written anew needs another look."""
    assert cell(fact).startswith(fact.says)


def test_every_row_has_a_cell_for_each_peer():
    """No column has slipped."""
    table = [row for row in ROWS if len(row) > 3]
    assert len(table) > 30
    assert {len(row) for row in table} == {len(ROWS[0])}


@pytest.mark.release
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_a_package_that_is_installed_agrees(fact):
    """In the environment of the tests, where somebody has the peer, too."""
    files = installed(fact.package, fact.version)
    if files is None:
        pytest.skip(f"{fact.package} {fact.version} is not installed here")
    assert fact.holds(files)


def test_a_fact_holds_by_what_is_in_the_files(tmp_path):
    """A yes wants the word in the named file, a no wants it nowhere."""
    (tmp_path / "cli.py").write_text("--spare")
    (tmp_path / "other.py").write_text("nothing")
    files = [*tmp_path.iterdir()]
    assert Fact("p", "1", "P", "row", "yes", r"--spare", "cli.py").holds(files)
    assert not Fact("p", "1", "P", "row", "yes", r"--spare", "other.py").holds(files)
    assert not Fact("p", "1", "P", "row", "no", r"--spare").holds(files)
    assert Fact("p", "1", "P", "row", "no: never", r"--absent").holds(files)
