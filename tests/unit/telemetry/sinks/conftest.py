"""What the tests of several sinks tell of."""

from __future__ import annotations

from pathlib import Path

import pytest
from told_run import ToldRun


@pytest.fixture
def run(tmp_path: Path) -> ToldRun:
    """A run with a hang."""
    made = ToldRun.make(tmp_path)
    made.begin()
    made.fail_and_recover()
    return made
