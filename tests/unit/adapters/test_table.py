"""The table of docs/adapters: each adapter has an answer to everything that one of them gives."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "adapters" / "README.md").read_text()
SUITE = (ROOT / "tests" / "integration" / "adapters_contract" / "README.md").read_text()
ADAPTERS = ("pytorch", "Lightning", "Accelerate", "DeepSpeed", "Transformers", "Megatron")
HEAD, _, *ROWS = [line.strip("|").split("|") for line in TEXT.splitlines() if line.count("|") == len(ADAPTERS) + 3]


def test_it_has_a_column_for_each_adapter():
    """Beside what it is about, and which run of the suite asks for it."""
    assert [cell.strip(" `") for cell in HEAD] == ["", *ADAPTERS, "run"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_no_cell_is_empty_and_each_row_is_tested(row):
    """Where a framework lacks a seam, the cell says which; the run is one of the suite's."""
    assert all(cell.strip() for cell in row)
    for run in row[-1].split(","):
        assert f"\n| {run.strip()} |" in SUITE
