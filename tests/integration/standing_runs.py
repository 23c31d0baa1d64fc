"""Runs `scripts/standing.py`, in which one rank does something for long, and keeps what was said about it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
from harness import job

STUCK_AFTER_S = 3.0
RECENT_S = 6.0  # what a rank did in these last seconds counts as what it does now
_BUSY_LOOP = "while True: pass"


@attrs.frozen
class Standing:
    """What is left of one job."""

    code: int | None
    """None where it did not end in time."""
    screen: str
    left: list[str]
    attempts: int
    incidents: list[dict[str, Any]]
    stalls: list[dict[str, Any]]
    ends: list[dict[str, Any]]
    confirmed: list[dict[str, Any]]
    notes: Mapping[str, tuple[float, ...]]
    """`WHAT@WHERE-ATTEMPT-RANK`: when it began and, if it did, ended (Unix seconds)."""

    def began(self, attempt: int) -> float:
        """Return when the one thing of an attempt began."""
        ((began, *_),) = [times for name, times in self.notes.items() if name.split("-")[1] == str(attempt)]
        return began


@attrs.frozen
class Plan:
    """One job: where it runs, and what one of its ranks does."""

    tier: str
    todo: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Of the script."""
    run: tuple[str, ...] = ()
    """Of `resilience run`."""
    ranks: int = 2

    def start(self, folder: Path, patience_s: float) -> Standing:
        """Run the job to its end."""
        options = ("--nproc-per-node", str(self.ranks), *self.run)
        with job(folder, *options, "standing.py", "--tier", self.tier, *self.options, *self.todo) as run:
            try:
                code = run.process.wait(patience_s)
            except subprocess.TimeoutExpired:  # the other jobs of its module are told apart from it
                code = None
            notes = {path.name: tuple(map(float, path.read_text().split())) for path in run.told("*@*")}
            return Standing(
                code=code,
                screen=run.screen,
                left=run.left_behind() if code is not None else [],
                attempts=len(run.events("attempt_start")),
                incidents=run.incidents(),
                stalls=run.events("stall"),
                ends=run.events("stall_end"),
                confirmed=run.events("confirmed"),
                notes=notes,
            )


def run_all(folder: Path, plans: Mapping[str, Plan], patience_s: float) -> dict[str, Standing]:
    """Run all these jobs side by side."""
    folders = {name: folder / name for name in plans}
    for each in folders.values():
        each.mkdir()
    with ThreadPoolExecutor(len(plans)) as pool:
        found = {name: pool.submit(plan.start, folders[name], patience_s) for name, plan in plans.items()}
        return {name: future.result() for name, future in found.items()}


@contextlib.contextmanager
def busy_loops(count: int = 2) -> Iterator[None]:
    """Keep as many processors busy meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", _BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def check_never_ended(found: Standing) -> None:
    """Assert that nothing was done to a job, and that nobody was called hung."""
    assert found.code == 0, found.screen
    assert found.attempts == 1
    assert [(incident["kind"], incident["cause"]) for incident in found.incidents] == []
    assert (found.confirmed, found.left) == ([], []), found.screen
    assert "HANG" not in found.screen


def notices_before(found: Standing, attempt: int) -> list[dict[str, Any]]:
    """Return the notices of an attempt that came before its verdict."""
    verdict = next((each["detected_at"] for each in found.incidents if each["attempt"] == attempt), 0.0)
    return [stall for stall in found.stalls if stall["attempt"] == attempt and stall["t"] < verdict]


def check_named(found: Standing, attempt: int, plan: str, rank: int) -> None:
    """Assert that what stood still in an attempt was named, and noticed if at all, with what was seen of it."""
    what = plan.partition("@")[0]
    incident = next((each for each in found.incidents if each["attempt"] == attempt), None)
    assert incident is not None, found.screen
    assert incident["kind"] == "hang"
    assert [culprit["rank"] for culprit in incident["culprits"]] == [rank], found.screen
    assert incident["cause"] == ("hang_rank_stopped" if what == "stop" else "hang_rank_stuck"), found.screen
    for notice in notices_before(found, attempt)[-1:]:
        assert [each["rank"] for each in notice["ranks"]] in ([rank], [])
        expected = {"stopped"} if what == "stop" else {"stuck"}
        # It has worked until then, and may not have been watched for long; a worker works as it starts.
        if what == "worker" or notice["t"] - found.began(attempt) < RECENT_S:
            expected |= {"busy", "unknown"}
        assert {each["activity"] for each in notice["ranks"]} <= expected, notice
    rules = [evidence["text"] for evidence in incident["evidence"] if evidence["source"] == "rule"]
    # On a busy machine the step of an earlier attempt may have lasted so long that the place is given three times that.
    granted = ("stuck_after", "what was survived here")
    assert any(words in rule for rule in rules for words in granted), rules
