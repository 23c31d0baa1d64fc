"""Spans tell the story of a run, with ids that do not depend on who tells it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from told_run import EVENTS, ToldRun

from resilience_sdk.core.journal import Event
from resilience_sdk.telemetry.sinks.otel import Span, Spans


def spans_of(run: ToldRun) -> list[Span]:
    """Return all spans of what was told, with those that end with the run."""
    spans = Spans("run")
    return [span for line in run.lines() for span in spans.apply(line.event)] + spans.close()


def told(tmp_path: Path) -> ToldRun:
    """Tell of a run with a save and a hang."""
    run = ToldRun.make(tmp_path)
    run.begin()
    run.tell(Event.CKPT_BEGIN, writer="rank0", step=50)
    run.tell(Event.CKPT_COMMIT, writer="rank0", step=50, seconds=0.1)
    run.fail_and_recover()
    run.tell(Event.ATTEMPT_END, attempt=1, ended_by="ranks", exit_codes={"0": 0, "1": 0})
    run.tell(Event.FINISHED, attempt=1)
    return run


def test_a_run_holds_its_attempts_and_these_what_happened_in_them(tmp_path: Path) -> None:
    """run > attempt > incident > recovery, and attempt > checkpoint; only what went wrong is an error."""
    spans = spans_of(told(tmp_path))
    by_id = {span.span_id: span for span in spans}
    parents = {
        (span.name, span.attributes.get("resilience.attempt")): by_id[span.parent_id].name if span.parent_id else None
        for span in spans
    }
    assert parents == {
        ("run", None): None,
        ("attempt", 0): "run",
        ("attempt", 1): "run",
        ("incident", None): "attempt",
        ("recovery", None): "incident",
        ("checkpoint", None): "attempt",
    }
    assert {span.trace_id for span in spans} == {spans[0].trace_id}
    assert {span.name: span.error for span in spans if span.error} == {"incident": "link_down", "attempt": "hang"}
    assert all(span.start <= span.end for span in spans)


def test_an_incident_begins_with_the_first_sign_of_it(tmp_path: Path) -> None:
    """From the suspicion to its confirmation; the recovery goes on from there."""
    spans = {span.name: span for span in spans_of(told(tmp_path))}
    assert spans["incident"].start < spans["incident"].end == spans["recovery"].start < spans["recovery"].end
    assert spans["incident"].attributes["resilience.kind"] == "hang"


def test_who_tells_it_again_tells_the_same(tmp_path: Path) -> None:
    """An exporter that was restarted sends spans with the ids that they had."""
    run = told(tmp_path)
    assert spans_of(run) == spans_of(run)


def test_the_next_job_is_another_trace(tmp_path: Path) -> None:
    """A requeued job has the key of the one before; it is a run of its own, and the one before is over."""
    run = told(tmp_path)
    run.begin()
    runs = [span for span in spans_of(run) if span.name == "run"]
    assert len({span.trace_id for span in runs}) == 2
    assert runs[0].end <= runs[1].start


def test_a_save_that_was_cut_off_ends_with_its_attempt(tmp_path: Path) -> None:
    """And is told as what it is."""
    run = ToldRun.make(tmp_path)
    run.begin()
    run.tell(Event.CKPT_BEGIN, writer="rank0", step=50)
    run.tell(Event.ATTEMPT_END, ended_by="ranks", exit_codes={"0": -9})
    assert [(span.name, span.error) for span in spans_of(run)][:2] == [("checkpoint", "cut off"), ("attempt", "ranks")]


def test_what_never_recovered_is_told_as_that(tmp_path: Path) -> None:
    """With the end of the run."""
    run = ToldRun.make(tmp_path)
    run.begin()
    run.tell(Event.INCIDENT, id="0001-crash", kind="crash", category="user", cause="user_error", action="stop")
    assert {span.name: span.error for span in spans_of(run) if span.error} == {
        "incident": "user_error",
        "recovery": "not recovered",
    }


def test_attempts_under_a_foreign_launcher(tmp_path: Path) -> None:
    """Where nobody tells of attempts, the first rank of each does."""
    run = ToldRun.make(tmp_path)
    for attempt in (0, 1):
        for rank in (0, 1):
            run.tell(Event.RANK_START, writer=f"rank{rank}", attempt=attempt)
    assert [span.name for span in spans_of(run)] == ["attempt", "attempt", "run"]


@given(st.lists(EVENTS, max_size=16))
@example([{"event": "attempt_end", "t": 1.0, "exit_codes": {"0": [7]}}])
@settings(max_examples=15, deadline=None)
def test_no_event_breaks_it(events: list[dict[str, object]]) -> None:
    """Every span has ids that OpenTelemetry takes, and does not end before it began."""
    spans = Spans("run")
    for span in [span for event in events for span in spans.apply(event)] + spans.close():
        assert 0 < span.span_id < 1 << 64
        assert 0 < span.trace_id < 1 << 128
        assert span.start <= span.end
