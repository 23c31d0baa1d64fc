"""A `Run` of which one rank cannot be recorded: no rank waits for what that one does not do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .harness import PROJECT, SCRIPTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lacking", [0, 1])
def test_it_trains_to_its_end_and_saves_nothing(tmp_path, lacking):
    """Whichever rank that is. It is said, and the finished flag is not set."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RESILIENCE_")}
    plain |= {"PYTHONPATH": str(PROJECT), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    # As on two nodes: ranks of one share what the first of them has found.
    places = [
        {"RESILIENCE_RUN_DIR": str(tmp_path / "run"), "RESILIENCE_PAGE_DIR": str(tmp_path / f"pages-{node}")}
        for node in range(2)
    ]
    for place in places:
        os.mkdir(place["RESILIENCE_PAGE_DIR"], mode=0o700)
    places[lacking]["RESILIENCE_RUN_DIR"] = "/proc/none/run"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "unrecorded.py"), str(tmp_path / "rendezvous")],
            env=plain | {"RANK": str(rank), "LOCAL_RANK": str(rank), **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, place in enumerate(places)
    ]
    try:
        ends = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert [out for out, _ in ends] == ["5 steps, saved: None\n"] * 2
    assert "NOTHING IS SAVED" in ends[lacking][1]
    if lacking == 1:
        assert "a rank cannot be recorded" in ends[0][1]
    assert not (tmp_path / "run" / "finished").exists()
