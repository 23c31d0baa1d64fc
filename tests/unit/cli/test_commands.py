"""The reading commands, on real files: good, torn, missing and hostile ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resilience_sdk.cli.main import EXIT_UNREAD, main
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.dashboard.runs import RunReader
from resilience_sdk.incidents import Culprit, Evidence, Incident, IncidentStore, event_fields
from resilience_sdk.system import hostinfo

HOSTILE = "\x1b]0;owned\x07\x1b[2J\nresilience: all is well"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run")
    launcher = Journal(run.journal, writer="launcher", host="node1", boot_id="b", job="job-a")
    launcher.emit(Event.RUN_START)
    launcher.emit(Event.ATTEMPT_START, world_size=2)
    rank = Journal(run.journal, writer="rank0", host="node1", boot_id="b", job="job-a", rank=0)
    rank.emit(Event.RANK_START)
    rank.emit(Event.FIRST_BEAT, step=1)
    rank.emit(Event.CKPT_COMMIT, step=40)
    rank.emit(Event.DEGRADED, what="flight recorder", why="is off")
    launcher.emit(Event.RANK_EXIT, rank=1, signal="SIGKILL", exit_code=None)
    launcher.close()
    rank.close()
    return run


def _incident(run: RunDirectory, **changes: Any) -> Incident:
    fields: dict[str, Any] = {
        "attempt": 0,
        "detected_at": time.time(),
        "culprits": (Culprit(1, "node1", 41, HOSTILE, ("train.py:3 step", HOSTILE)),),
        "victims": (0,),
        "category": "user_code",
        "cause": "deadlock",
        "confidence": 0.8,
        "evidence": (Evidence("stack", HOSTILE),),
        **changes,
    }
    return IncidentStore(run.path).create("hang", Incident(**fields))


def _outcome(run: RunDirectory, **changes: Any) -> None:
    outcome = {
        "verdict": "give_up",
        "exit_code": 1,
        "reason": "spent",
        "attempts": 4,
        "resume": "resilience run x",
    }
    run.outcome.write_text(json.dumps({**outcome, "ended_at": time.time() + 5, **changes}))


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_status(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """One screen tells job, ranks, checkpoint, incidents and what did not work."""
    _incident(run)
    assert main(["status", str(run.path)]) == 0
    said = capsys.readouterr().out
    for words in (
        "job-a, attempt 0, 2 ranks",
        "stepping",
        "ended by SIGKILL",
        "step 40",
        "0001-hang",
        "flight recorder",
    ):
        assert words in said
    assert "killed with its launcher" in said
    assert "\x1b" not in said
    assert len([line for line in said.splitlines() if line.startswith("resilience:")]) == 0


def test_status_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented keys are there, with or without anything to tell."""
    full = _json(capsys, "status", str(run.path))
    assert full["ranks"][1]["signal"] == "SIGKILL"
    assert full["checkpoint"]["step"] == 40
    assert full["state"] == "lost"
    empty = _json(capsys, "status", str(RunDirectory.create(run.path / "other").path))
    assert empty.keys() == full.keys()
    assert empty["state"] == "empty"
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    for key in (*full, *full["ranks"][0], *full["incidents"], *full["journal"]):
        assert f"`{key}`" in page, f"docs/commands.md does not describe {key}"


def test_status_of_a_running_job(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """A held lease is a running job, an outcome from before it notwithstanding."""
    _outcome(run)
    Lease.acquire(run, "job-a")
    status = _json(capsys, "status", str(run.path))
    assert status["state"] == "running"
    assert status["in_use_by"] == {"job": "job-a", "host": hostinfo.host_name(), "pid": os.getpid()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are verified through /proc")
def test_status_reads_live_pages(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each rank on this host does now is in its page, under any launcher; garbage is passed over."""
    code = (
        "import sys\nfrom resilience_sdk import heartbeat, straggler\n"
        "with heartbeat(step=7), straggler.section('fwd'):\n print('in', flush=True)\n sys.stdin.read()\n"
    )
    env = {**os.environ, "RESILIENCE_PAGE_DIR": str(tmp_path), "RESILIENCE_RUN_DIR": str(run.path)}
    monkeypatch.setenv("RESILIENCE_PAGE_DIR", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        pages = next(tmp_path.glob("resilience-*/*/*.page")).parent
        (pages / "a0-r5-12.page").write_bytes(b"x" * 70_000)
        (pages / "a0-r6-12.page").touch()
        status = _json(capsys, "status", str(run.path))
        assert main(["status", str(run.path)]) == 0
        assert "fwd" in capsys.readouterr().out
        process.communicate(b"")
    (live,) = status["live"]
    assert (live["rank"], live["pid"], live["sections"][-1]) == (0, process.pid, "fwd")
    assert status["state"] == "running"
    assert _json(capsys, "status", str(run.path))["live"] == []


def test_torn_journal_lines_are_counted(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed writer leaves half a line; the rest is shown and the loss is said."""
    with next(run.journal.glob("*rank0*")).open("ab") as file:
        file.write(b'{"t": 1, "event": "fir\n{"t": NaN, "event": "x"}\n' + b"[" * 100_000)
    status = _json(capsys, "status", str(run.path))
    assert status["journal"]["torn_lines"] == 3
    assert status["ranks"][0]["state"] == "stepping"
    assert main(["status", str(run.path)]) == 0
    assert "3 torn journal lines were skipped" in capsys.readouterr().out


def test_missing_parts_are_named(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Without journal and incidents the outcome is still told."""
    for path in run.journal.iterdir():
        path.unlink()
    run.journal.rmdir()
    run.incidents.rmdir()
    _outcome(run)
    status = _json(capsys, "status", str(run.path))
    assert status["state"] == "ended"
    assert any("journal" in problem for problem in status["problems"])


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff"])
def test_a_torn_outcome(run: RunDirectory, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """`outcome` refuses it in one line, `status` goes on without it."""
    run.outcome.write_text(text)
    assert main(["outcome", str(run.path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("resilience: ")
    assert len(said.err.splitlines()) == 1
    assert "outcome.json" in said.err
    assert any("outcome.json" in problem for problem in _json(capsys, "status", str(run.path))["problems"])


def _stall(run: RunDirectory, **changes: Any) -> None:
    rank = {
        "rank": 0,
        "node": "node1",
        "step": 41,
        "activity": "stuck",
        "still_s": 40.0,
        "stack": [],
        "detail": HOSTILE,
    }
    facts = {"since": time.time() - 40, "for_s": 40.0, "ranks": [rank], "waiting": [1], **changes}
    monitor = Journal(run.journal, writer="monitor", host="node1", boot_id="b", job="job-a")
    monitor.emit(Event.STALL, **facts)
    monitor.close()


def test_what_stood_still_when_all_of_a_job_was_killed(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody was left to write the incident, so `why` takes it from the journal; not while the job runs."""
    assert "stall" not in _json(capsys, "why", str(run.path))
    _stall(run)
    assert main(["why", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "killed while rank 0 on node1 made no progress for 40 s at step 41 (hang_rank_stuck)" in said
    assert "\x1b" not in said
    told = _json(capsys, "why", str(run.path))["stall"]
    assert (told["id"], told["cause"], told["culprits"][0]["rank"]) == (None, "hang_rank_stuck", 0)
    lease = Lease.acquire(run, "job-a")
    assert "stall" not in _json(capsys, "why", str(run.path))
    lease.release()
    _incident(run)
    assert "stall" not in _json(capsys, "why", str(run.path)), "it has an incident"


def test_recovery_in_the_words_of_what_happened(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """While a job runs, when it has ended (of which `not yet` is untrue), and where it went on by itself."""
    _incident(run, action="restart")
    lease = Lease.acquire(run, "job-a")
    for words in ((), ("--verbose",)):
        assert main(["why", *words, str(run.path)]) == 0
        assert "the run has not gone on yet" in capsys.readouterr().out
    lease.release()
    _outcome(run, ended_at=time.time() + 1)
    for words in ((), ("--verbose",)):
        assert main(["why", *words, str(run.path)]) == 0
        said = capsys.readouterr().out
        assert "the job ended before it recovered" in said
        assert "yet" not in said
    hang = _incident(run, action="none", detection_latency_s=15.0)
    IncidentStore(run.path).mark_recovered(str(hang.id), float(hang.detected_at or 0.0) + 6.0)
    assert main(["why", "--last", str(run.path)]) == 0
    assert "it went on by itself after 21 s" in capsys.readouterr().out
    assert "It went on by itself after 21 s." in (run.incidents / str(hang.id) / "report.md").read_text()


def test_an_outcome_of_an_earlier_job_says_nothing_of_this_one(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was written before this one began: how this one ended, nobody has told."""
    _outcome(run, ended_at=time.time() - 3600)
    _incident(run, action="restart")
    assert main(["why", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "The job ended" not in said
    assert "no job runs here now, and none told that it went on" in said


def test_why_of_a_job_without_an_incident(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """How it ended is an answer too."""
    _outcome(run, verdict="finished", exit_code=0, reason="all ranks exited with 0", resume=None)
    assert main(["why", str(run.path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"no incident in {run.path}"
    assert said[1].startswith("The job finished at ")
    assert said[2:] == ["", f"page           resilience report {run.path}"]
    run.report.write_text("drawn")
    assert main(["why", str(run.path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"page           {run.report}"


def test_outcome(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict, exit code and how to go on; `--exit-code` hands the code to a script."""
    assert main(["outcome", str(run.path)]) == 2
    assert "has no outcome" in capsys.readouterr().err
    resume = "resilience run x 'a  b' " + "y" * 1000
    _outcome(run, exit_code=75, verdict="preempted", resume=resume)
    assert main(["outcome", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "preempted, exit code 75" in said
    assert f"run again by   {resume}\n" in said, "a command to copy is never cut"
    for verdict, name in (("stop", "after a repair"), ("hardware", "elsewhere     ")):
        _outcome(run, exit_code=77, verdict=verdict, resume=resume)
        for command in ("outcome", "status"):
            assert main([command, str(run.path)]) == 0
            assert f"{name} {resume}\n" in capsys.readouterr().out
    _outcome(run, exit_code=75, verdict="preempted", resume=resume)
    assert main(["outcome", "--exit-code", str(run.path)]) == 75
    capsys.readouterr()
    outcome = _json(capsys, "outcome", str(run.path))
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    for key in outcome:
        assert f"`{key}`" in page


@pytest.mark.parametrize("form", ["resilience run --run-dir {} x.py {}-old", "RESILIENCE_RUN_DIR={} python x.py"])
def test_a_directory_that_was_moved_is_told_of_where_it_is(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Place, page and the command that goes on; the old place may be gone, or another run by now."""
    before, now = str(run.path), tmp_path / "moved" / "my run"
    _outcome(run, verdict="preempted", exit_code=75, run_dir=before, resume=form.format(before, before))
    run.report.write_text("drawn")
    now.parent.mkdir()
    run.path.rename(now)
    expected = form.format(f"'{now}'", before)
    for command in ("outcome", "why", "status"):
        assert main([command, str(now)]) == 0
        said = capsys.readouterr().out
        assert expected in said
        assert f"page           {now / 'report.html'}" in said or command == "status"
        assert before not in said.replace(expected, "")
    outcome = _json(capsys, "outcome", str(now))
    assert (outcome["run_dir"], outcome["resume"]) == (str(now), expected)


def test_outcome_with_odd_values(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of a wrong type are null, and numbers that JSON does not know too."""
    _outcome(run, exit_code="1", verdict=3, ended_at=float("inf"), attempts=True, incidents=[1, "a"])
    outcome = _json(capsys, "outcome", str(run.path))
    assert outcome["exit_code"] is outcome["verdict"] is outcome["ended_at"] is outcome["attempts"] is None
    assert outcome["incidents"] == ["a"]
    assert main(["outcome", "--exit-code", str(run.path)]) == 2


def test_the_flag_alone_is_an_outcome(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a foreign launcher only the flag is there."""
    run.mark_finished({})
    outcome = _json(capsys, "outcome", str(run.path))
    assert (outcome["verdict"], outcome["exit_code"]) == ("finished", 0)
    assert _json(capsys, "status", str(run.path))["state"] == "finished"


def test_why(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Which rank, where, why and what to do; nothing that a job wrote steers the terminal or fakes a line."""
    assert main(["why", str(run.path)]) == 0
    assert "no incident" in capsys.readouterr().out
    _incident(run)
    assert main(["why", str(run.path)]) == 0
    said = capsys.readouterr().out
    for words in (
        "0001-hang",
        "rank 1",
        "node1",
        "step 41",
        "train.py:3 step",
        "deadlock",
        "start the same job again",
        f"resilience why --verbose {run.path}",
    ):
        assert words in said
    assert "\x1b" not in said
    assert "\x07" not in said
    assert not any(line.startswith("resilience:") for line in said.splitlines())


def test_why_verbose(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that is known, in rows: each piece of evidence with its source, and every frame."""
    stack = tuple(f"/lib/python3.11/site-packages/torch/x.py:{line} f" for line in range(40))
    _incident(
        run, culprits=tuple(Culprit(rank, "node1", 41, HOSTILE, (*stack, "train.py:3 step")) for rank in range(9))
    )
    assert main(["why", "--verbose", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert said.count("at train.py:3 step") == 9
    assert said.count("torch/x.py:7 f") == 9
    for words in ("evidence    stack: ", "confidence 0.80", "action      restart", "victims     rank 0", "report.md"):
        assert words in said
    assert "\x1b" not in said
    assert not any(line.startswith("resilience:") for line in said.splitlines())


def test_why_json(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """`{"incidents": [...]}` with every stable key, null where nothing is known."""
    assert _json(capsys, "why", str(run.path)) == {"incidents": []}
    _incident(run, attempt=None)
    (found,) = _json(capsys, "why", str(run.path))["incidents"]
    keys = [
        "id",
        "kind",
        "attempt",
        "detected_at",
        "detection_latency_s",
        "culprits",
        "victims",
        "category",
        "cause",
        "action",
        "confidence",
        "evidence",
        "recovered_at",
        "recovery_s",
        "lost_steps",
    ]
    assert sorted(found) == sorted(keys)
    assert found["attempt"] is found["recovered_at"] is None
    assert found["culprits"][0]["stack"][0] == "train.py:3 step"


@pytest.mark.parametrize("kept", ["both", "journal", "directory"])
def test_every_command_tells_of_the_same_incidents(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    """Also of one whose directory was removed, which says so, and of one that the journal does not have."""
    _incident(run, culprits=(Culprit(1, "node1"),), cause="rank_killed_sigkill", action="restart")
    (incident,) = IncidentStore(run.path).all()
    if kept != "directory":
        journal = Journal(run.journal, writer="launcher", host="node1", boot_id="b", job="job-a")
        journal.emit(Event.INCIDENT, **event_fields(incident))
        journal.close()
    if kept == "journal":
        shutil.rmtree(run.incidents)
    (told,) = _json(capsys, "why", str(run.path))["incidents"]
    status, top = _json(capsys, "status", str(run.path))["incidents"], _json(capsys, "top", str(run.path))
    assert main(["report", "--json", str(run.path)]) == 0
    report = json.loads(capsys.readouterr().out)["incidents"]
    row = RunReader(run.path).look()
    assert status["count"] == top["incidents"] == len(report) == row.incidents == 1
    assert row.last_incident is not None
    ids = [told["id"], status["last"]["id"], top["last_incidents"][0]["id"], report[0]["id"], row.last_incident.id]
    assert ids == [incident.id] * 5
    assert told["culprits"][0]["rank"] == 1
    assert told["cause"] == row.last_incident.cause == "rank_killed_sigkill"
    assert main(["why", str(run.path)]) == 0
    assert (f"incidents/{incident.id} is not there" in capsys.readouterr().out) is (kept == "journal")


def test_why_tells_of_checkpoints(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """What was not written, not loaded or put in quarantine, with the reason, once each; no control characters."""
    rank = Journal(run.journal, writer="rank1", host="node1", boot_id="b", job="job-a", rank=0)
    rank.emit(Event.CKPT_FAIL, step=50, error=f"No space left on device{HOSTILE}")
    for _ in range(2):
        rank.emit(Event.CKPT_SKIP, step=40, checkpoint="step-00000040", why="state.pt has 1 bytes instead of 2")
    rank.emit(Event.CKPT_QUARANTINE, step=30, checkpoint="step-00000030", why="the run failed soon after it")
    rank.close()
    notes = _json(capsys, "why", str(run.path))["checkpoints"]
    assert [(note["step"], note["what"]) for note in notes] == [
        (50, "was not written"),
        (40, "was not loaded"),
        (30, "is in quarantine"),
    ]
    assert main(["why", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "step 40 was not loaded: state.pt has 1 bytes instead of 2" in said
    assert "\x1b" not in said
    assert not any(line.startswith("resilience:") for line in said.splitlines())


def test_why_one(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """An incident is named by id or number; an unknown one is answered with those there are."""
    _incident(run)
    _incident(run, attempt=1)
    for words in (("--last",), ("--incident", "0002-hang"), ("--incident", "2")):
        assert [i["id"] for i in _json(capsys, "why", str(run.path), *words)["incidents"]] == ["0002-hang"]
    assert main(["why", str(run.path), "--incident", "7"]) == 2
    assert "0001-hang" in capsys.readouterr().err


def test_a_torn_report_is_one_incident(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are shown as ever."""
    _incident(run)
    _incident(run)
    (run.incidents / "0001-hang" / "report.json").write_text("{")
    assert main(["why", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "cannot be read" in said
    assert "0002-hang" in said


@pytest.mark.parametrize("command", ["status", "why", "outcome"])
def test_no_run_directory(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named or not, the answer is one line with a cure, and 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RESILIENCE_RUN_DIR", raising=False)
    for words in ((), (str(tmp_path / "nothing\x1b[2J"),), (str(tmp_path),), ("",)):
        assert main([command, *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("resilience: ")
        assert len(said.err.splitlines()) == 1
        assert "\x1b" not in said.err


def test_the_newest_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `resilience run`, `resilience status` needs no name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RESILIENCE_RUN_DIR", raising=False)
    run = RunDirectory.create(tmp_path / "resilience-runs" / "x")
    assert _json(capsys, "status")["run_dir"] == str(run.path)


def test_a_reader_that_leaves_is_no_error(run: RunDirectory) -> None:
    """`resilience why | head -0` ends quietly, with the code of a program that met a broken pipe."""
    for _ in range(3):
        _incident(run)
    with subprocess.Popen(
        [sys.executable, "-m", "resilience_sdk", "why", str(run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == EXIT_UNREAD
