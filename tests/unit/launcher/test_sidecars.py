"""A process beside the ranks is kept running, and whatever becomes of it hurts nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.core.lease import Lease, current_holder
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.launcher import sidecars
from resilience_sdk.launcher.sidecars import KeptProcess, write_report
from resilience_sdk.system import programs
from resilience_sdk.system.hostinfo import process_start_ticks
from resilience_sdk.system.programs import Program

_UNTIL_OVER = "sys.stdin.readline(); sys.stdin.readline()"


class Kept:
    """Processes that run `program`, at a time that the test sets."""

    def __init__(self, journal: Journal) -> None:
        self.now = 100.0
        self.journal = journal
        self.started = 0

    def make(self, program: str, *, delay_s: float = 0.0) -> KeptProcess:
        """Return one that has not been started."""
        return KeptProcess("helping", "the helper", Program(program), {"do": "this"}, self.journal, delay_s=delay_s)

    def told(self) -> list[str]:
        """Return what the journal says of it."""
        return [str(event["why"]) for event in read_journal(self.journal.path.parent).events]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """A clock of the test's own, and an empty journal."""
    (tmp_path / "journal").mkdir()
    made = Kept(Journal(tmp_path / "journal", writer="launcher", host="here", boot_id="", job="job"))
    monkeypatch.setattr(sidecars, "time", SimpleNamespace(monotonic=lambda: made.now))
    start = programs.start

    def counted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        made.started += 1
        return start(*args, **options)

    monkeypatch.setattr(programs, "start", counted)
    return made


def ended(process: KeptProcess) -> int:
    """Wait for the end of what runs now, and return its status."""
    assert process._process is not None
    return process._process.wait(20)


def test_it_gets_its_task_and_nothing_of_the_ranks(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that tells a rank who it is, and no module of the same name as one of a library's."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESILIENCE_INTERNAL_JOB", "job")
    monkeypatch.setenv("RESILIENCE_MAX_RESTARTS", "3")
    program = (
        "import json; names = [name for name in os.environ if name.startswith('RESILIENCE')]; "
        "import resilience_sdk; open('told', 'w').write(json.dumps([sys.stdin.readline(), names]))"
    )
    process = kept.make(program)
    process.keep_alive()
    assert ended(process) == 0
    process.close(20.0)
    task, names = json.loads((tmp_path / "told").read_text())
    assert json.loads(task) == {
        "do": "this",
        "parent_pid": os.getpid(),
        "parent_ticks": process_start_ticks(os.getpid()),
    }
    assert names == ["RESILIENCE_MAX_RESTARTS"]


def test_one_that_dies_is_started_ever_more_rarely(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    """And that is told once, not each time."""
    process = kept.make("sys.exit(3)")
    starts = []
    for second in range(200):
        kept.now = 100.0 + second
        before = kept.started
        process.keep_alive()
        if kept.started > before:
            starts.append(second)
            assert ended(process) == 3
    process.close(20.0)
    assert starts == [0, 1, 3, 7, 15, 31, 63, 123, 183]  # a minute is the longest pause
    assert kept.told() == ["the helper ended with status 3"]
    assert capsys.readouterr().err.count("the helper ended") == 1


def test_it_starts_when_it_may(kept: Kept) -> None:
    """Not before its delay has passed."""
    process = kept.make("pass", delay_s=10.0)
    process.keep_alive()
    kept.now += 9.0
    process.keep_alive()
    assert kept.started == 0
    kept.now += 1.0
    process.keep_alive()
    assert kept.started == 1
    process.close(20.0)


def test_one_that_cannot_be_started_is_told(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of processes, memory or descriptors: the training goes on, and it is tried again."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    process = kept.make("pass")
    process.keep_alive()
    kept.now += 60.0
    process.keep_alive()
    assert kept.started == 2
    (why,) = kept.told()
    assert why.startswith("the helper cannot be started")
    process.close(20.0)


def test_one_that_cannot_be_started_again_holds_up_nothing(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe of the one before is closed by then."""
    process = kept.make("sys.exit(3)")
    process.keep_alive()
    assert ended(process) == 3
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    kept.now += 60.0
    process.keep_alive()
    assert kept.started == 2
    process.close(20.0)


def test_it_is_told_that_the_job_is_over(kept: Kept, tmp_path: Path) -> None:
    """In a line, which a launcher that is killed does not write: then there is only the end of the pipe."""
    told = tmp_path / "told"
    process = kept.make(f"open({str(told)!r}, 'w').write('|'.join(sys.stdin.readline() for _ in range(2)))")
    process.keep_alive()
    process.close(20.0)
    assert told.read_text().endswith("}\n|over\n")


def test_nobody_waits_for_one_that_has_closed_its_input(kept: Kept) -> None:
    """What it still does concerns nobody here."""
    process = kept.make("import os, time; sys.stdin.readline(); os.close(0); time.sleep(600)")
    process.keep_alive()
    began = time.monotonic()
    process.close(60.0)
    assert time.monotonic() - began < 30.0
    assert process._process is not None
    assert process._process.poll() is None
    process._process.kill()
    process._process.wait()


@pytest.mark.parametrize("program", [_UNTIL_OVER, "sys.exit(1)"])
def test_it_ends_when_the_job_is_over(kept: Kept, program: str) -> None:
    """One that ended before does not matter; nothing is started afterwards."""
    process = kept.make(program)
    process.keep_alive()
    process.close(20.0)
    assert process._process is not None
    assert process._process.returncode is not None
    kept.now += 100.0
    process.keep_alive()
    assert kept.started == 1


def test_nobody_waits_for_one_that_does_not_end(kept: Kept) -> None:
    """It goes on by itself."""
    process = kept.make("import time; time.sleep(600)")
    process.keep_alive()
    process.close(0.05)
    assert process._process is not None
    assert process._process.poll() is None
    process._process.kill()
    process._process.wait()


def test_what_is_sent_to_the_launchers_group_is_not_meant_for_it(kept: Kept) -> None:
    """A Ctrl-C ends the ranks; the exporter has to tell of that."""
    process = kept.make(_UNTIL_OVER)
    process.keep_alive()
    assert process._process is not None
    assert os.getpgid(process._process.pid) != os.getpgrp()
    process.close(20.0)
    assert process._process.returncode == 0


def test_without_a_task_there_is_nothing(kept: Kept) -> None:
    """Neither to start nor to end."""
    process = KeptProcess("helping", "the helper", Program("pass"), None, kept.journal)
    process.keep_alive()
    process.close(20.0)
    assert process._process is None


@pytest.mark.parametrize("looks", [0, 3])
def test_a_report_is_given_up_soon_after_somebody_asks_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """Before it begins, or while it is written: a scheduler that waits for long kills the launcher."""
    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal", writer="launcher", host="here", boot_id="", job="job")
    monkeypatch.setattr(programs, "COMMAND", Program("import time; time.sleep(600)"))
    monkeypatch.setattr(sidecars, "_HURRIED_REPORT_S", 0.3)
    monkeypatch.setattr(sidecars, "_REPORT_LOOK_S", 0.05)
    asked: list[None] = []

    def is_hurried() -> bool:
        asked.append(None)
        return len(asked) > looks

    began = time.monotonic()
    assert not write_report(tmp_path, tmp_path / "report.html", journal, is_hurried=is_hurried)
    assert time.monotonic() - began < 30.0
    (told,) = read_journal(tmp_path / "journal").events
    assert (told["event"], told["what"]) == ("degraded", "report")


def test_a_lease_is_renewed_until_the_launcher_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the main thread waits for meanwhile, a report that is written slowly too; and not afterwards."""
    monkeypatch.setattr(sidecars, "RENEW_INTERVAL_S", 0.01)
    run_dir = RunDirectory.create(tmp_path / "run")
    lease = Lease.acquire(run_dir, "job")
    os.utime(run_dir.lease, (1.0, 1.0))
    assert current_holder(run_dir) is None
    with sidecars.LeaseRenewal(lease):
        until_s = time.monotonic() + 20.0
        while current_holder(run_dir) is None:
            assert time.monotonic() < until_s
    os.utime(run_dir.lease, (1.0, 1.0))
    lease.release()
    assert not run_dir.lease.exists()


def test_a_helper_that_has_given_up_is_not_started_again(kept: Kept) -> None:
    """It has said why, and would end alike."""
    process = kept.make(f"sys.exit({programs.GAVE_UP})")
    process.keep_alive()
    assert process._process is not None
    process._process.wait(20)
    for _ in range(3):
        kept.now += 100
        process.keep_alive()
    assert (kept.started, kept.told()) == (1, [])
    process.close(1.0)
