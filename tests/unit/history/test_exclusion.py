"""Nodes that the next job of a run leaves out, and what is said of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import needed
import pytest
from told_fleet import ToldFleetRun

from resilience_sdk.cli.main import main
from resilience_sdk.core.journal import Event
from resilience_sdk.history.exclusion import nodes_to_leave_out
from resilience_sdk.history.indexer import Index

DAY = 86400.0


def a_run(folder: Path, *, days_ago: float, failing: str | None = "hostB", sick: str | None = None) -> ToldFleetRun:
    """A run on two nodes, which its scheduler calls otherwise; of one the hardware failed, and ended the job."""
    run = ToldFleetRun.make(folder, ["hostA", "hostB"], at=time.time() - days_ago * DAY)
    run.aliases = {"hostA": "n1", "hostB": "n2"}
    run.start()
    if sick is not None:
        run.tell(sick, Event.HEALTH, ok=False, check="ecc", status="warning", evidence="3 errors")
    run.at += 3600
    if failing is not None:
        run.fail(failing, "gpu_fell_off_bus", "hardware", action="exclude_node")
        run.tell("hostA", Event.DECISION, verdict="hardware", exit_code=76)
    run.end()
    return run


def index(database: Path, *dirs: Path) -> None:
    """Take runs into an index."""
    one = Index(str(database))
    one.add(dirs)
    one.close()


def test_the_verdict_alone_needs_no_index(tmp_path: Path) -> None:
    """The node has the name of its scheduler; a job that began since then is blamed for nothing."""
    run = a_run(tmp_path / "run", days_ago=1)
    found = nodes_to_leave_out(run.path, {}, since=0.0)
    assert found.reasons == {"n2": "gpu_fell_off_bus in this run (0001-crash)"}
    assert (found.hostlist, found.problem, found.warnings) == ("n2", None, ())
    run.start()
    run.close()
    assert not nodes_to_leave_out(run.path, {}, since=0.0).reasons


def test_suspects_of_the_history_beside_the_run_are_left_out_too(tmp_path: Path) -> None:
    """The run itself is taken in first."""
    needed.library("sqlalchemy", "history")
    index(tmp_path / "history.db", a_run(tmp_path / "old", days_ago=3).path)
    now = a_run(tmp_path / "now", days_ago=1)
    now.start()
    now.close()
    found = nodes_to_leave_out(now.path, {}, since=0.0)
    assert found.problem is None
    assert found.reasons == {"n2": "suspect: 2 independent failures in 2 runs: gpu_fell_off_bus (2 times)"}


def test_an_index_that_cannot_be_asked_leaves_out_what_the_verdict_blames(tmp_path: Path) -> None:
    """And the reason is there to be said."""
    needed.library("sqlalchemy", "history")
    run = a_run(tmp_path / "run", days_ago=1)
    (tmp_path / "history.db").write_text("no database at all, of more than sixteen bytes")
    found = nodes_to_leave_out(run.path, {}, since=0.0)
    assert list(found.reasons) == ["n2"]
    assert found.problem is not None


def test_what_announces_a_failure_is_told_before_it_strikes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With how often it was right, when the job comes back; for that alone no node is left out."""
    needed.library("sqlalchemy", "history")
    calm = ToldFleetRun.make(tmp_path / "calm", ["hostC"], at=time.time() - 20 * DAY)
    calm.start()
    calm.at += 19 * DAY
    calm.end()
    for number, failing in enumerate(["hostA", "hostB", "hostA"]):
        a_run(tmp_path / f"old{number}", days_ago=4 + 3 * number, failing=failing, sick=failing)
    run = a_run(tmp_path / "run", days_ago=0.1, failing=None, sick="hostB")
    index(tmp_path / "history.db", tmp_path)
    assert main(["nodes", "--exclude-list", "--after", str(run.path)]) == 0
    said = capsys.readouterr()
    assert "n2: ecc (3 errors); a node with it failed within 24 h 3 of 3 times" in " ".join(said.err.split())
    assert "n2" not in said.out
    assert main(["nodes", "--json", "--after", str(run.path)]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("node n2: ecc")
