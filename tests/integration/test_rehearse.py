"""`resilience rehearse` on real jobs: one that does all as it should, and six with one fault of integration each."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from adapter_frameworks import require
from harness import SCRIPTS

from tests.rehearsals import PROJECT, Rehearsed, rehearse


def rehearsed(folder: Path, *words: str, script: str = "") -> Rehearsed:
    """Rehearse the script of these tests, with that fault of its own."""
    return rehearse(folder, *words, script=SCRIPTS / "rehearsed.py", arguments=(script,) if script else ())


@pytest.mark.slow
def test_a_good_job_passes_and_leaves_nothing(tmp_path: Path) -> None:
    """Every promise is kept, a total time is said before the faults, and the scratch directory is gone."""
    done = rehearsed(tmp_path, "kill", "preempt")
    assert done.code == 0, done.screen
    assert {*done.results("none").values(), *done.results("kill").values(), *done.results("preempt").values()} == {
        "PASS"
    }
    assert set(done.results("kill")) >= {"noticed", "named", "recovered", "steps lost", "save complete", "end equal"}
    assert done.screen.index(" in all") < done.screen.index("RESILIENCE_FAULT=")
    assert (done.left, done.document["kept"]) == ([], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "fault", "broken"),
    [
        ("alone", "none", "save complete"),
        ("no-progress", "none", "progress seen"),
        pytest.param("eats", "preempt", "noticed", marks=pytest.mark.release),
        pytest.param("rank0", "preempt", "all ranks left", marks=pytest.mark.release),
        ("data", "kill", "end equal"),
        pytest.param("in-place", "corrupt-checkpoint", "save complete", marks=pytest.mark.release),
    ],
)
def test_a_fault_of_integration_is_found(tmp_path: Path, script: str, fault: str, broken: str) -> None:
    """With exit code 1, by the promise that is about it, with a cure, and what it left is kept and named."""
    words = ("kill", "--stuck-after", "2") if fault == "none" else (fault,)
    done = rehearsed(tmp_path, *words, script=script)
    assert (done.code, done.results(fault)[broken]) == (1, "FAIL"), done.screen
    assert "cure: " in done.screen
    if broken == "end equal":
        [end] = [promise for _, promise in done.promises() if promise["promise"] == broken]
        assert (end["component"], end["step"], end["ranks"]) == ("loss", 20, [0, 1]), "the first one behind the save"
        assert set(done.document["varying"]) <= {"generators of NumPy", "generators of Python"}, "which it never seeds"
    [kept] = done.left
    assert done.document["kept"] == str(kept)
    assert (kept / ("undisturbed" if fault == "none" else fault) / "output.log").read_text()


def rehearsed_alone(folder: Path, *faults: str, way: str = "") -> Rehearsed:
    """Rehearse the training of one process."""
    return rehearse(folder, *faults, script=SCRIPTS / "rehearsed_alone.py", arguments=(way,) if way else ())


@pytest.mark.release
@pytest.mark.slow
def test_a_script_of_one_process_is_no_two_copies_and_its_place_is_what_it_lost(tmp_path: Path) -> None:
    """Two copies shared its checkpoint; and a save in mid-epoch was called one that does not work."""
    done = rehearsed_alone(tmp_path, "kill")
    assert (done.code, done.document["ranks"], done.document["processes"]) == (1, 1, "one"), done.screen
    told = {promise["promise"]: promise for fault, promise in done.promises() if fault == "kill"}
    failed = {name for name, promise in told.items() if promise["result"] == "FAIL"}
    assert failed == {"steps lost", "end equal"}, done.screen
    assert told["save complete"]["why"] == "gone on after 21 steps"
    assert "5 more were run than were left: the place in the epoch is lost" in told["steps lost"]["why"]
    assert {told[name]["cure"].partition(":")[0] for name in failed} == {"save and load the place in the data"}


@pytest.mark.release
@pytest.mark.slow
def test_a_script_of_one_process_that_keeps_its_place_passes(tmp_path: Path) -> None:
    """At a kill, and at a stop."""
    done = rehearsed_alone(tmp_path, "kill", "preempt", "slow", way="place")
    assert done.code == 0, done.screen
    assert {*done.results("kill").values(), *done.results("preempt").values()} == {"PASS"}, done.screen
    assert done.results("slow") == {"rehearsed": "SKIPPED"}


@pytest.mark.release
@pytest.mark.slow
def test_a_stop_in_mid_epoch_that_loses_its_place_is_said_as_that(tmp_path: Path) -> None:
    """The save at the signal works."""
    done = rehearsed_alone(tmp_path, "preempt")
    told = {promise["promise"]: promise for fault, promise in done.promises() if fault == "preempt"}
    failed = {name for name, promise in told.items() if promise["result"] == "FAIL"}
    assert failed == {"steps lost", "end equal"}, done.screen
    assert "the place in the epoch is lost" in told["steps lost"]["why"], told
    assert told["save complete"]["why"].startswith("saved at the stop"), told


@pytest.mark.release
@pytest.mark.slow
def test_a_script_that_starts_its_ranks_by_itself_is_run_once(tmp_path: Path) -> None:
    """Nothing strikes in them, and it is said how they become ranks of the launcher."""
    done = rehearsed_alone(tmp_path, "kill", way="spawn")
    assert (done.code, done.document["processes"]) == (0, "own"), done.screen
    assert [one["fault"] for one in done.document["faults"]] == ["none"]
    assert done.results("none")["rehearsed"] == "SKIPPED"
    assert "resilience run --nproc-per-node N" in done.screen


MOMENTS = ("kill-in-window", "kill-in-eval", "kill-at-epoch-end", "kill-in-save", "kill-twice")


@pytest.mark.release
@pytest.mark.slow
def test_a_good_job_passes_at_every_moment(tmp_path: Path) -> None:
    """A training with epochs, an accumulation and evaluations comes to all of them, and each is what it is called."""
    done = rehearse(tmp_path, *MOMENTS, script=SCRIPTS / "rehearsed_moments.py")
    assert done.code == 0, done.screen
    for fault in MOMENTS:
        assert set(done.results(fault).values()) == {"PASS"}, done.screen
    plans = {one["fault"]: one["plan"] for one in done.document["faults"]}
    assert plans["kill-in-window"].endswith("step=29"), "the step before it has added its gradients up"
    assert plans["kill-at-epoch-end"].endswith("step=31")
    assert "section=eval" in plans["kill-in-eval"]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgotten", "component", "step", "ranks"),
    [
        ("order", "samples", 25, [0, 1]),
        ("rate", "learning rate", 27, [0, 1]),
        ("momentum", "weights", 27, [0, 1]),
        ("dropout", "generators", 25, [1]),
    ],
)
def test_what_is_forgotten_is_named(
    tmp_path: Path, forgotten: str, component: str, step: int, ranks: list[int]
) -> None:
    """By what differs first: at the first step of the optimizer behind the save, or at the one that follows from it."""
    done = rehearse(tmp_path, "kill", script=SCRIPTS / "rehearsed_moments.py", arguments=(forgotten,))
    assert done.code == 1, done.screen
    [end] = [promise for fault, promise in done.promises() if (fault, promise["promise"]) == ("kill", "end equal")]
    assert (end["result"], end["component"], end["step"], end["ranks"]) == ("FAIL", component, step, ranks), done.screen


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True])
def test_a_record_that_is_another_one_is_named(tmp_path: Path, forgets: bool) -> None:
    """Where the training itself is the same: an average that a callback logs, and begins anew."""
    require("transformers")
    done = rehearse(tmp_path, "kill", script=SCRIPTS / "rehearsed_records.py", arguments=("forgets",) * forgets)
    [end] = [promise for fault, promise in done.promises() if (fault, promise["promise"]) == ("kill", "end equal")]
    assert (end["result"], end["component"]) == (("FAIL", "record") if forgets else ("PASS", None)), done.screen
    assert ("average" in end["why"]) is forgets, end
    assert forgets or "records of" in end["why"], end


@pytest.mark.release
@pytest.mark.slow
def test_what_two_undisturbed_runs_do_not_repeat_is_said_once(tmp_path: Path) -> None:
    """And is no failure: a script without a seed ends otherwise each time."""
    done = rehearse(
        tmp_path, "kill", "kill-in-window", script=SCRIPTS / "rehearsed_moments.py", arguments=("unseeded",)
    )
    assert done.code == 0, done.screen
    assert done.results("kill")["end equal"] == done.results("kill-in-window")["end equal"] == "SKIPPED"
    assert done.screen.count("two undisturbed runs differ by themselves") == 1
    assert done.document["varying"]["weights"] == 1


@pytest.mark.release
@pytest.mark.slow
def test_a_job_goes_on_at_its_own_pace_once_the_answer_is_there(tmp_path: Path) -> None:
    """Its ranks are told so as soon as the journal has it, and not by a time."""
    kept = tmp_path / "kept"
    done = rehearsed(tmp_path, "monitor-kill", "--keep", str(kept))
    assert (done.code, done.results("monitor-kill")["noticed"]) == (0, "PASS"), done.screen
    assert [path.parent.parent.name for path in kept.glob("*/traces-*/answered")] == ["monitor-kill"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_ends_its_job_too_and_what_was_found_is_told(tmp_path: Path, number: signal.Signals) -> None:
    """A terminal that is closed in the middle of a job leaves no process and no directory behind."""
    mark = uuid.uuid4().hex  # in the words of every rank
    words = ("rehearse", "kill", "--", str(SCRIPTS / "rehearsed.py"), "", mark)
    with subprocess.Popen(
        [sys.executable, "-m", "resilience_sdk", *words],
        env=os.environ | {"PYTHONPATH": str(PROJECT), "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # as a terminal has it
    ) as process:
        assert process.stdout is not None
        try:
            told = next(line for line in process.stdout if "RESILIENCE_FAULT=kill" in line)
            until = time.monotonic() + 60
            while len(_processes(mark)) < 3 and time.monotonic() < until:  # the launcher, and its ranks
                time.sleep(0.05)
            process.send_signal(number)
            told += process.stdout.read()
            assert process.wait(60) != 0
        finally:
            process.kill()
    assert "interrupted in kill" in told
    assert re.search(r"\d passed, 0 failed, \d skipped", told), told
    until = time.monotonic() + 20
    while _processes(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert _processes(mark) == []
    assert list(tmp_path.glob("resilience-rehearse*")) == []


def _processes(mark: str) -> list[str]:
    """Return the command lines in which the mark is, but for that of the rehearsal itself."""
    found = [
        text.split("\0") for path in Path("/proc").glob("[0-9]*/cmdline") if (text := _read(path)) and mark in text
    ]
    return [" ".join(words) for words in found if "rehearse" not in words]


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
