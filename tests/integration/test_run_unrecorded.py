"""A `Run` on two ranks that no monitor sees together, since one lacks a page or a run directory: they stop as one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from .harness import PROJECT, SCRIPTS

pytestmark = pytest.mark.slow
LACKS_PAGE = {"RESILIENCE_PAGE_DIR": "/dev/null/nowhere"}
LACKS_RUN = {"RESILIENCE_RUN_DIR": "/proc/none/run"}


def train(folder, lacking, *, asks):
    """Return what each of two ranks printed and said; each has pages of its own, as on two nodes."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RESILIENCE_")}
    plain |= {"PYTHONPATH": str(PROJECT), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "ASKS": str(asks)}
    (folder / "port").unlink(missing_ok=True)
    ranks = []
    with contextlib.ExitStack() as running:
        for rank in range(2):
            pages = folder / f"pages-{rank}"
            pages.mkdir(mode=0o700, exist_ok=True)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "RESILIENCE_JOB_ID": "job"}
            own |= {"RESILIENCE_RUN_DIR": str(folder / "run"), "RESILIENCE_PAGE_DIR": str(pages)}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPTS / "unrecorded.py"), str(folder)],
                    env=plain | own | lacking.get(rank, {}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            running.enter_context(ranks[-1])
            running.callback(ranks[-1].kill)
        ends = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    return [out for out, _ in ends], [error for _, error in ends]


@pytest.mark.parametrize(("lacking", "asks"), [({0: LACKS_PAGE}, 1), ({1: LACKS_PAGE}, 1), ({}, 0)])
def test_who_lacks_a_page_saves_and_stops_with_the_others(tmp_path, lacking, asks):
    """Whichever rank that is, and whoever is asked; so do ranks whose pages no monitor sees together."""
    printed, said = train(tmp_path, lacking, asks=asks)
    left = int(printed[0].split("left after ")[1].split()[0])
    assert printed == [f"resumed after 0\nleft after {left} saved after {left}\n"] * 2, said
    for rank, error in enumerate(said):
        assert error.count("not watched") == (rank in lacking), error


def test_ranks_without_pages_go_on_where_they_left(tmp_path):
    """All of them lack one, as where there is no place on a node."""
    left = "0"
    for _ in range(2):
        printed, said = train(tmp_path, {0: LACKS_PAGE, 1: LACKS_PAGE}, asks=0)
        assert printed[0] == printed[1], said
        assert printed[0].startswith(f"resumed after {left}\n"), said
        left = printed[0].split()[5]
    assert int(left) > 4


@pytest.mark.parametrize("lacks", [0, 1])
def test_where_one_lacks_a_run_directory_all_stop_and_save_nothing(tmp_path, lacks):
    """It is said, and the finished flag is not set."""
    printed, said = train(tmp_path, {lacks: LACKS_RUN}, asks=1 - lacks)
    left = int(printed[0].split("left after ")[1].split()[0])
    assert printed == [f"resumed after 0\nleft after {left} saved after None\n"] * 2, said
    assert said[lacks].count("NOTHING IS SAVED") == 1
    if lacks == 1:
        assert said[0].count("a rank cannot be recorded") == 1
    assert not (tmp_path / "run" / "finished").exists()
