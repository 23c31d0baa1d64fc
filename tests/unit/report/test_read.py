"""The facts of a run directory, whatever lies in it."""

from __future__ import annotations

import itertools
import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from told_run import EVENTS, ToldRun

from resilience_sdk.core.journal import Event
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.incidents import Culprit, Evidence, Incident, IncidentStore
from resilience_sdk.report.facts import RunFacts
from resilience_sdk.report.read import read_run
from tests.told_fleet import ToldFleetRun

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\x1b[31m<script>\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
_FIELDS = (
    "job", "host", "attempt", "rank", "step", "ranks", "own_ms", "wall_s", "mean_ms", "longest_ms", "loss", "grad_norm",
    "values", "what", "ok", "why", "cure", "status", "text", "seconds", "stall_s", "bytes", "since", "for_s", "waiting",
    "sections", "steps", "script", "argv", "nodes", "world_size", "at", "by", "error", "suspects", "recovery_s",
    "signal", "exit_code", "found", "value", "verdict", "reason", "boot_id", "mono_ns", "unheld_s", "rendezvous_s",
    "created_at", "checkpoint", "time_left_s", "step_is_global", "lost_steps", "resumed_at", "share", "action", "kind",
    "id",
)  # fmt: skip
_HOSTILE = st.builds(
    lambda name, t, fields: {**fields, "event": name, "t": t},
    st.sampled_from([event.value for event in Event]),
    st.floats(0, 4e9) | st.floats(-1e15, 1e15),
    st.dictionaries(st.sampled_from(_FIELDS), _ANY, max_size=8),
)


@pytest.fixture(autouse=True)
def pages(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job of this machine is seen."""
    monkeypatch.setenv("RESILIENCE_PAGE_DIR", str(tmp_path_factory.mktemp("pages")))


def texts_of(value: Any) -> Iterator[str]:
    """Yield every text in facts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts_of(key)
            yield from texts_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_of(item)


def checked(facts: RunFacts) -> RunFacts:
    """Return facts that can be shown: bounded, without control characters, arrays of one length."""
    for text in texts_of(attrs.asdict(facts)):
        assert len(text) < 20_000
        assert all(character.isprintable() or character in "\n\t" for character in text), text
    for curve in (*facts.step_time, *facts.loss):
        assert len(curve.at) == len(curve.steps) == len(curve.values) <= 2 * 400
        assert len(curve.low) == len(curve.high) in (0, len(curve.at))
        assert list(curve.at) == sorted(curve.at)
    if facts.heat is not None:
        assert len(facts.heat.rows) == len(facts.heat.cells) == len(facts.heat.nodes) <= 128
        assert all(len(row) == len(facts.heat.times) - 1 <= 120 for row in facts.heat.cells)
    for name, most in (("attempts", 200), ("incidents", 100), ("checkpoints", 300), ("events", 100), ("segments", 600)):
        assert len(getattr(facts, name)) <= most
    return facts


@given(st.lists(_HOSTILE | EVENTS, max_size=12), st.sampled_from(["", '{"event": "pro', "\0\0", "[1]"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_journal_holds_there_are_facts(events: list[dict[str, Any]], torn: str) -> None:
    """And no part is left out: a value that cannot be understood is one value less."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDirectory.create(Path(folder) / "run")
        lines = [json.dumps(event) for event in events]
        half = len(lines) // 2
        (run_dir.journal / "a-launcher-1.jsonl").write_text("\n".join(lines[:half]) + "\n")
        (run_dir.journal / "b-monitor-2.jsonl").write_text("\n".join([*lines[half:], torn]))
        facts = checked(read_run(run_dir))
        assert [problem for problem in facts.problems if "left out" in problem or "cannot read" in problem] == []
        torn_lines = [problem for problem in facts.problems if "torn" in problem]
        assert bool(torn_lines) == (bool(torn) or any(abs(event["t"]) >= 1e15 for event in events))


def test_an_empty_directory_has_facts(tmp_path: Path) -> None:
    """Nothing has run in it."""
    facts = checked(read_run(RunDirectory.create(tmp_path / "run")))
    assert (facts.headline.state, facts.attempts, facts.goodput, facts.problems) == ("empty", (), {}, ())
    assert (facts.started_at, facts.ended_at, facts.heat) == (None, None, None)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A journal that is a file, an outcome that is torn, an incident that was never finished, a report of somebody."""
    run_dir = RunDirectory.create(tmp_path / "run")
    IncidentStore(run_dir.path).create("crash", Incident(cause="unknown", detected_at=5.0))
    (run_dir.incidents / "0001-crash" / "report.json").write_text('{"id": "0001')
    (run_dir.incidents / ".0002").mkdir()
    run_dir.outcome.write_text("{")
    (run_dir.path / "stragglers").mkdir()
    report = run_dir.path / "stragglers" / "report.json"
    report.write_text("{}")
    report.chmod(0o666)
    for file in run_dir.journal.iterdir():
        file.unlink()
    run_dir.journal.rmdir()
    run_dir.journal.write_text("")
    facts = checked(read_run(run_dir))
    told = "\n".join(facts.problems)
    assert [one.id for one in facts.incidents] == ["0001-crash"]
    for words in ("cannot read", "outcome.json is torn", "the report of incident 0001-crash", "belongs to somebody"):
        assert words in told, told


def _trained(tmp_path: Path) -> ToldFleetRun:
    run = ToldFleetRun.make(tmp_path / "run", ["n0", "n1"], ranks_per_node=2)
    run.start()
    for _ in range(2):
        run.at += 10
        for rank in range(4):
            run.tell(f"n{rank // 2}", Event.FIRST_BEAT, rank=rank, step=0)
        for minute in range(1, 11):
            run.at += 60
            for node in (0, 1):
                own = [100.0, 150.0 if node else None]
                run.tell(
                    f"n{node}", Event.PROGRESS, step=100 * minute, step_is_global=True, steps=100, wall_s=60.0,
                    mean_ms=600.0 + node, longest_ms=900.0, ranks=[2 * node, 2 * node + 1], own_ms=own,
                )  # fmt: skip
            run.tell("n0", Event.LOSS, rank=0, step=100 * minute, loss=1.0 / minute, grad_norm="inf")
        run.tell("n0", Event.CKPT_COMMIT, rank=0, step=900, bytes=10, seconds=1.0, stall_s=0.5)
        run.tell("n1", Event.HEALTH, what="xid GPU 3", ok=False, status="failed", why="Xid 79", cure="drain the node")
        if run._attempt == 0:
            run.fail("n1", "gpu_lost", "hardware")
    run.end()
    return run


def test_curves_pins_and_lists_of_a_run(tmp_path: Path) -> None:
    """Two attempts of two nodes, the second of which never told its end."""
    run = _trained(tmp_path)
    facts = checked(read_run(RunDirectory.open(run.path), now=run.at + 5))
    mean, longest = facts.step_time
    assert [value for value in mean.values if value is not None] == pytest.approx([0.6005] * 20)
    assert mean.values.count(None) == 1  # between the attempts
    assert {value and round(value, 4) for value in longest.values} == {0.9, None}
    loss, norm = facts.loss
    assert loss.values[0] == 1.0
    assert (norm.values, norm.not_finite[0][1:]) == ((), (100, "inf"))
    assert facts.heat is not None
    assert (facts.heat.rows, facts.heat.nodes) == (((0, 0), (1, 1), (2, 2), (3, 3)), ("n0", "n0", "n1", "n1"))
    assert facts.heat.worst[0][:2] == (3, "n1")
    assert {cell for row in facts.heat.cells for cell in row} == {1.0, 1.5, None}
    assert [(one.attempt, one.incidents) for one in facts.attempts] == [
        (0, ()),
        (1, ("0001-crash",)),
    ]  # told as it begins
    assert [one.outcome for one in facts.checkpoints] == ["committed"] * 2
    (finding,) = facts.findings
    assert (finding.node, finding.status, finding.cure, finding.count) == ("n1", "failure", "drain the node", 2)
    assert (facts.world_size, facts.nodes, facts.headline.state) == (4, 2, "lost")
    assert facts.headline.next
    spans = [one for one in facts.segments if one.bucket == "productive"]
    assert [one.attempt for one in spans] == [0, 1]
    assert all(before.ended_at == after.began_at for before, after in itertools.pairwise(facts.segments))
    names = [name for _, name, _ in facts.events]
    assert names.count("attempt_start") == 2  # of four that the two nodes told
    assert names.count("incident") == 1


@pytest.mark.parametrize("is_global", [False, True])
def test_programs_are_not_told_a_number_that_nobody_counted(tmp_path: Path, is_global: bool) -> None:
    """The page says `unknown` of the steps that were done again; its JSON said 0.0."""
    told = ToldRun.make(tmp_path)
    told.begin()
    for rank in (0, 1):
        told.tell(Event.FIRST_BEAT, attempt=0, rank=rank, step=0, step_is_global=is_global)
    told.tell(Event.INCIDENT, attempt=0, action="restart", id="0001-crash", kind="crash")
    facts = read_run(told.run_dir)
    assert (facts.goodput["faults"], facts.goodput["buckets"]["replayed"]) == (1, 0.0 if is_global else None)


def test_the_second_job_of_a_directory_is_named(tmp_path: Path) -> None:
    """The newest job stood beside the beginning of the first."""
    told = ToldRun.make(tmp_path)
    told.begin()
    told.tell(Event.DECISION, exit_code=75, verdict="preempted")
    one = read_run(told.run_dir)
    told.begin()
    two = read_run(told.run_dir)
    assert (one.job_number, one.job_started_at) == (1, one.started_at)
    assert (two.job_number, two.started_at) == (2, one.started_at)
    assert (two.job_started_at or 0.0) >= (one.ended_at or 0.0) > 0.0
    assert [(attempt.job_number, attempt.attempt) for attempt in two.attempts] == [(1, 0), (2, 0)]


def test_an_incident_has_what_why_says_of_it(tmp_path: Path) -> None:
    """Its frames say which are the user's; the newest one has the command to go on with."""
    told = ToldRun.make(tmp_path)
    told.begin()
    stack = ("/v/lib/python3.11/site-packages/torch/nn/functional.py:9 linear", "/home/me/train.py:15 step")
    incident = Incident(
        attempt=0, detected_at=2e9, category="user", cause="user_code_error", action="stop", confidence=0.9,
        culprits=(Culprit(1, "n0", 40, "fwd", stack, step_is_global=True),), victims=(0, 2, 3),
        evidence=(Evidence("exception", "ValueError: \x1b[31mbad"), Evidence("cure", "read the message")),
    )  # fmt: skip
    IncidentStore(told.run_dir.path).create("crash", incident)
    outcome = {"verdict": "stop", "exit_code": 77, "reason": "it would end alike", "resume": "resilience run train.py"}
    told.run_dir.outcome.write_text(json.dumps({**outcome, "ended_at": 3e9}))
    facts = checked(read_run(told.run_dir))
    (card,) = facts.incidents
    assert "ValueError" in card.headline
    assert "Seen in attempt 0" in card.paragraph
    assert "linear" not in card.paragraph
    assert (card.victims, card.culprits) == ("0, 2-3", ((1, "n0", "step 40", "fwd"),))
    assert card.stacks[0].is_users == (False, True)
    assert (card.what_to_change, card.rerun) == ("Read the message.", "resilience run train.py")
    assert ("cure", "read the message") not in card.evidence
    assert facts.headline.state == "ended"
    assert "77" in facts.headline.what
    assert facts.headline.commands[0] == "resilience run train.py"
    assert [(pin.kind, pin.step) for pin in facts.pins] == [("crash", 40)]


def test_lists_are_bounded_and_say_so(tmp_path: Path) -> None:
    """The newest incidents, and of the saves all that failed."""
    told = ToldRun.make(tmp_path)
    told.begin()
    store = IncidentStore(told.run_dir.path)
    for number in range(103):
        store.create("crash", Incident(detected_at=1e9 + number, attempt=0))
    for step in range(400):
        told.tell(Event.CKPT_FAIL if step == 1 else Event.CKPT_COMMIT, step=step, error="disk full")
    facts = checked(read_run(told.run_dir))
    assert (len(facts.incidents), facts.hidden_incidents, facts.incidents[-1].id) == (100, 3, "0103-crash")
    assert (len(facts.checkpoints), facts.hidden_checkpoints) == (300, 100)
    assert [one.step for one in facts.checkpoints if one.outcome == "failed"] == [1]
    assert facts.checkpoints[-1].step == 399


def test_the_headline_of_a_job_that_was_killed_tells_what_stood_still_and_how_to_go_on(tmp_path: Path) -> None:
    """Nobody has told its end: the reason is what its monitor noticed, and it goes on from the newest checkpoint."""
    told = ToldRun.make(tmp_path)
    told.begin()
    told.tell(Event.CKPT_COMMIT, step=80)
    rank = {"rank": 1, "node": "n0", "step": 90, "step_is_global": True, "activity": "stopped", "section": "fwd"}
    told.tell(Event.STALL, writer="monitor", since=1.0, ranks=[rank], waiting=[0], text="no progress")
    facts = checked(read_run(told.run_dir))
    assert facts.headline.state == "lost"
    assert "rank 1 on n0 made no progress" in str(facts.headline.why)
    assert facts.headline.next == "Start the same command again: it resumes after 80 steps."


@pytest.mark.parametrize("name", ["a run", "x; touch made", "$(touch made)", 'it\'s "it" <b>', "-x & y", "a\nb"])
def test_a_command_to_copy_is_one_for_a_shell(tmp_path: Path, name: str) -> None:
    """A directory is one word of it, whatever its name."""
    told = ToldRun(RunDirectory.create(tmp_path / name))
    told.begin()
    (command,) = checked(read_run(told.run_dir)).headline.commands
    assert shlex.split(command) == ["resilience", "status", str(tmp_path / name)]


def test_that_the_page_was_written_is_no_part_of_the_run(tmp_path: Path) -> None:
    """The run ends with its job, not with the report that its launcher writes behind it."""
    told = ToldRun.make(tmp_path)
    told.begin()
    before = read_run(told.run_dir).ended_at
    told.tell(Event.REPORT, path="report.html", seconds=0.5)
    assert (read_run(told.run_dir).ended_at, before is None) == (before, False)


@pytest.mark.parametrize(("faults", "why"), [(0, None), (2, "2 incidents on the way, the last one: ")])
def test_the_headline_of_a_finished_job_says_so(tmp_path: Path, faults: int, why: str | None) -> None:
    """And what it went through."""
    told = ToldRun.make(tmp_path)
    told.begin()
    for _ in range(faults):
        IncidentStore(told.run_dir.path).create("crash", Incident(detected_at=5.0, recovered_at=6.0))
    told.run_dir.mark_finished({})
    headline = checked(read_run(told.run_dir)).headline
    assert (headline.state, headline.next) == ("finished", None)
    assert headline.what.startswith("The job finished")
    assert headline.why == why if why is None else str(headline.why).startswith(why)


@pytest.mark.parametrize(("share", "rest"), [(0.25, [0.75]), (0.998, [])])
def test_what_a_step_takes_adds_up(tmp_path: Path, share: float, rest: list[float]) -> None:
    """What lies in no section has a row of its own, unless next to nothing does."""
    run = ToldFleetRun.make(tmp_path / "run", ["n0"], ranks_per_node=1)
    run.start()
    run.at += 10
    section = {"name": "fwd", "kind": "compute", "share": share, "least": share, "most": share, "rank": 0}
    run.tell("n0", Event.STEP_TIME, steps=100, wall_s=10.0, ranks=[0], sections=[section])
    facts = checked(read_run(RunDirectory.open(run.path), now=run.at + 5))
    assert [mean for name, _, mean, _, _ in facts.shares if name == "in no section"] == pytest.approx(rest)
