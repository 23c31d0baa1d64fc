"""The demo's verdict: it must not say that all is well when it is not."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import attrs
import pytest

from resilience_sdk.demo import command
from resilience_sdk.demo.command import SCENARIOS, Scenario, ScenarioOutcome, ScenarioVerdict, broken_promises, main
from resilience_sdk.errors import RunDirectoryError
from resilience_sdk.faults import Plan
from resilience_sdk.incidents import Culprit, Incident

UNDISTURBED, HUNG, KILLED, PREEMPTED = SCENARIOS


def outcome(
    first_step: int = 0, *incidents: Incident, loss: str = "0x1p+0", exit_code: int | None = 0
) -> ScenarioOutcome:
    """Return what a good run leaves behind."""
    result = {"first_step": first_step, "loss": loss, "parameters": "abc"}
    return ScenarioOutcome(exit_code, 5.0, {0: result, 1: result}, incidents)


REFERENCE = outcome()
HANG = Incident(
    id="0001-hang", kind="hang", culprits=(Culprit(1),), detection_latency_s=3.1, recovery_s=0.6, lost_steps=15
)


def test_a_run_that_keeps_all_promises_has_nothing_against_it() -> None:
    """Named, recovered, resumed at the checkpoint, and the same bits."""
    assert broken_promises(UNDISTURBED, REFERENCE, REFERENCE) == []
    assert broken_promises(HUNG, outcome(25, HANG), REFERENCE) == []


@pytest.mark.parametrize("lost", [15, 14])
def test_a_kill_may_come_before_another_rank_has_ended_its_step(lost: int) -> None:
    """That step is not lost, as it was not completed."""
    killed = Scenario("killed", Plan("kill", "sigkill", rank=1, step=40))
    crash = attrs.evolve(HANG, kind=killed.incident_kind, lost_steps=lost)
    assert broken_promises(killed, outcome(25, crash), REFERENCE) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "crash"}, "it was called crash, not hang"),
        ({"culprits": ()}, "it named rank nobody, not 1"),
        ({"culprits": (Culprit(0),)}, "it named rank [0], not 1"),
        ({"culprits": (Culprit(0), Culprit(1))}, "it named rank [0, 1], not 1"),
        ({"detection_latency_s": None}, "it does not say how long detection took"),
        ({"recovery_s": None}, "it does not say when training went on"),
        ({"lost_steps": None}, "it counted None lost steps, not 15"),
        ({"lost_steps": 14}, "it counted 14 lost steps, not 15"),
        ({"lost_steps": 40}, "it counted 40 lost steps, not 15"),
    ],
)
def test_each_wrong_word_in_the_report_is_found(changes: dict[str, object], sentence: str) -> None:
    """The report is held against the fault that is known to have struck."""
    wrong = attrs.evolve(HANG, **changes)
    assert broken_promises(HUNG, outcome(25, wrong), REFERENCE) == [sentence]


STOP = Incident(id="0001-preemption", kind="preemption", lost_steps=0)


@pytest.mark.parametrize(
    ("first_step", "lost", "left_with", "sentence"),
    [
        (63, 0, 75, None),
        (63, 0, 0, "it stopped with code 0, not 75"),
        (51, 0, 75, "it went on at step {51}, not at one after step 60, when it was asked to leave"),
        (63, 10, 75, "it counted 10 lost steps, not 0"),
        (63, None, 75, "it counted None lost steps, not 0"),
    ],
)
def test_a_stop_must_lose_nothing(first_step: int, lost: int | None, left_with: int, sentence: str | None) -> None:
    """The same command goes on after the last step that was made, and the first start said that it was asked to."""
    stopped = attrs.evolve(outcome(first_step, attrs.evolve(STOP, lost_steps=lost)), first_exit_code=left_with)
    assert broken_promises(PREEMPTED, stopped, REFERENCE) == ([] if sentence is None else [sentence])


def test_a_fault_without_a_report_and_two_reports_of_one_fault_are_both_wrong() -> None:
    """One fault is one incident."""
    assert broken_promises(HUNG, outcome(25), REFERENCE) == ["0 incidents were reported for one fault"]
    assert broken_promises(HUNG, outcome(25, HANG, HANG), REFERENCE) == ["2 incidents were reported for one fault"]


def test_a_false_alarm_in_the_undisturbed_run_is_a_failure() -> None:
    """Nothing was wrong there."""
    assert broken_promises(UNDISTURBED, outcome(0, HANG), REFERENCE) == [
        "nothing was wrong, and 1 incidents were reported"
    ]


def test_one_bit_in_the_loss_is_a_failure() -> None:
    """Close is not equal."""
    other = outcome(25, HANG, loss="0x1.0000000000001p+0")
    assert broken_promises(HUNG, other, REFERENCE)[0].startswith("rank 0 ended with other loss")


def test_a_restart_from_the_beginning_is_not_a_resume() -> None:
    """It would reach the same loss too, and lose all the work."""
    assert "it went on at step {0}, not at the checkpoint of step 25" in broken_promises(
        HUNG, outcome(0, HANG), REFERENCE
    )


def test_a_run_that_fails_or_does_not_end_is_a_failure() -> None:
    """Whatever else it left behind."""
    assert broken_promises(UNDISTURBED, outcome(exit_code=1), REFERENCE) == ["it left with code 1"]
    stuck = ScenarioOutcome(None, 240.0, {}, ())
    assert broken_promises(UNDISTURBED, stuck, stuck) == ["it did not end within 240 s"]
    silent = ScenarioOutcome(0, 5.0, {0: {}}, ())
    assert broken_promises(UNDISTURBED, silent, silent) == ["no result from rank 1"]


def test_keep_does_not_write_into_a_directory_that_holds_something(tmp_path: Path) -> None:
    """Runs of an earlier demo are finished: they would be mistaken for these."""
    (tmp_path / "something").touch()
    with pytest.raises(RunDirectoryError, match="something is there already"):
        main(["--keep", str(tmp_path)])


def test_exit_code_table_and_json_tell_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 and the sentence where a promise broke; the JSON is alone on standard output."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    good, bad = outcome(25, HANG), outcome(75, exit_code=1)
    verdicts = [
        ScenarioVerdict(UNDISTURBED, REFERENCE, ()),
        ScenarioVerdict(HUNG, good, ()),
        ScenarioVerdict(KILLED, bad, tuple(broken_promises(KILLED, bad, REFERENCE))),
    ]
    monkeypatch.setattr(command, "_run_all", lambda directory, talk: verdicts)
    assert main(["--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["ok"]
    assert [run["name"] for run in document["runs"]] == ["undisturbed", "hung", "killed"]
    assert document["runs"][1]["incidents"][0]["culprits"][0]["rank"] == 1
    assert document["runs"][1]["loss"] == 1.0
    assert document["runs"][2]["broken"]
    assert main([]) == 1
    text = capsys.readouterr().out
    assert "hang rank 1  rank 1   3.10 s    0.60 s     15 steps" in text
    assert "killed: it left with code 1" in text
    monkeypatch.setattr(command, "_run_all", lambda directory, talk: verdicts[:2])
    assert main([]) == 0


def test_the_runs_stay_in_one_directory_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever has seen the demo wants to read its reports; `--no-keep` and an interruption leave nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run_all(directory: Path, talk: object) -> list[ScenarioVerdict]:
        (directory / "hung" / "run").mkdir(parents=True)
        return [ScenarioVerdict(UNDISTURBED, REFERENCE, ()), ScenarioVerdict(HUNG, outcome(25, HANG), ())]

    monkeypatch.setattr(command, "_run_all", run_all)
    assert main([]) == 0
    [kept] = tmp_path.iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == f"The runs are in {kept}; try: resilience why {kept}/hung/run"
    assert (kept / "hung" / "run").is_dir()
    assert main(["--json"]) == 0
    [document] = [json.loads(capsys.readouterr().out)]
    assert Path(document["kept"]).parent == tmp_path
    before = set(tmp_path.iterdir())
    assert main(["--no-keep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] is None
    assert set(tmp_path.iterdir()) == before

    def interrupted(directory: Path, talk: object) -> list[ScenarioVerdict]:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([])
    assert set(tmp_path.iterdir()) == before
