"""The view of a run at one moment: its journal, who holds it, its living ranks, and how its last job ended.

Every command and the report begin with it, so that they say the same of a run. What else is told beside the incidents
follows from it: checkpoints with a fault, signs of the nodes' health, and a stall that nobody has written down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.core.lease import LeaseHolder, current_holder, renewed_after_s
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import one_line
from resilience_sdk.errors import ConfigError
from resilience_sdk.goodput.summary import Summary
from resilience_sdk.health.findings import HealthSign, signs_near
from resilience_sdk.incidents import Incident, stall_at, standing_words
from resilience_sdk.report.digest import JournalDigest, LossRows, ProgressRows, read_digest
from resilience_sdk.report.outcome import read_outcome
from resilience_sdk.report.run_state import (
    ReadAt,
    RunState,
    goodput_of,
    is_held,
    live_ranks,
    live_without_step_s,
    own_outcome,
    state_name,
    state_of,
)
from resilience_sdk.report.why_page import JobEnding

STATES = {
    "running": "running",
    "finished": "finished: training is complete",
    "ended": "ended",
    "lost": "no job holds it and none told how it ended: killed with its launcher, or under a foreign one",
    "empty": "nothing has run in it yet",
}


@attrs.frozen
class RunView:
    """A run directory as it was at one moment."""

    run_dir: RunDirectory
    digest: JournalDigest
    state: RunState
    """Of its newest job, as the events tell."""
    holder: LeaseHolder | None
    live: list[dict[str, Any]]
    """Its ranks on this host."""
    outcome: dict[str, Any] | None
    problems: list[str]
    """What could not be read."""
    read_at: ReadAt = attrs.field(factory=ReadAt.now)
    """When the reading of its journal began."""
    live_after_s: float = 0.0
    """How many seconds later its ranks were looked at."""

    @property
    def events(self) -> tuple[dict[str, Any], ...]:
        """The events by time; see `JournalDigest`."""
        return self.digest.events

    @property
    def is_running(self) -> bool:
        """Whether somebody uses the directory now."""
        return bool(self.live) or is_held(self.holder, self.state, self.outcome)

    @property
    def standing(self) -> str:
        """One of `STATES`."""
        return state_name(self.run_dir, self.state, self.outcome, is_running=self.is_running)

    @property
    def ending(self) -> JobEnding:
        """What became of the newest job, as far as it has told."""
        return JobEnding.of(own_outcome(self.state, self.outcome), running=self.is_running)

    def account(self) -> Summary:
        """Return what its time went into."""
        return goodput_of(
            self.events,
            is_running=self.is_running,
            renewed_after_s=renewed_after_s(self.run_dir),
            standing_s=max(0.0, live_without_step_s(self.live, self.state) - self.live_after_s),
            now=self.read_at,
        )


def look_at(run_dir: RunDirectory) -> RunView:
    """Return the view of a run directory as it is now; what cannot be read is named in `problems`, and not fatal."""
    problems: list[str] = []
    read_at = ReadAt.now()
    digest = _journal(run_dir.journal, problems)
    outcome = None
    try:
        outcome = read_outcome(run_dir)
    except ConfigError as error:
        problems.append(str(error))
    holder, live = current_holder(run_dir), live_ranks(run_dir)
    return RunView(
        run_dir=run_dir,
        digest=digest,
        state=state_of(digest.events),
        holder=holder,
        live=live,
        outcome=outcome,
        problems=problems,
        read_at=read_at,
        live_after_s=(ReadAt.now().monotonic_ns - read_at.monotonic_ns) / 1e9,
    )


def _journal(directory: Path, problems: list[str]) -> JournalDigest:
    try:
        digest = read_digest(directory)
    except OSError as error:
        problems.append(f"cannot read {directory}: {error.strerror}; nothing is known about the ranks")
        return JournalDigest((), 0, ProgressRows(), LossRows(), LossRows(), 0, ())
    if digest.torn_lines:
        lines = "line was" if digest.torn_lines == 1 else "lines were"
        problems.append(f"{digest.torn_lines} torn journal {lines} skipped")
    problems += [f"journal file not read: {name}" for name in digest.unreadable_files]
    return digest


_NOTES = {
    Event.CKPT_FAIL.value: "was not written",
    Event.CKPT_SKIP.value: "was not loaded",
    Event.CKPT_QUARANTINE.value: "is in quarantine",
}


def find_notes(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `{at, step, what, why}` of every checkpoint that something was wrong with, oldest first.

    A damaged checkpoint is found again by every resume; it is listed once, when it was found first.
    """
    notes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in events:
        what = _NOTES.get(str(event.get("event")))
        if what is not None:
            if "time_left_s" in event:  # a job that was asked to leave
                what = "was not written"
            why = str(event.get("why") or event.get("error") or "no reason given")
            note = {"at": event["t"], "step": event.get("step"), "what": what, "why": why}
            notes.setdefault((str(note["step"]), what, why), note)
    return list(notes.values())


def signs_of(incident: Incident, events: Sequence[Mapping[str, Any]]) -> list[HealthSign]:
    """Return the health events around an incident, those that tell most first."""
    return [] if incident.detected_at is None else signs_near(incident.detected_at, events)


def sign_words(sign: HealthSign, incident: Incident) -> str:
    """Return one such event in a line; one with the incident's own cause says so."""
    event = sign.event
    when = f"{abs(sign.after_s):.0f} s {'before' if sign.before else 'after'}"
    same = ", the same cause" if event.get("cause") and event.get("cause") == incident.cause else ""
    why = f": {event['why']}" if event.get("why") else ""
    return one_line(f"{when}, on {event.get('host')}, {event.get('what')}{why}{same}")


def untold_stall(view: RunView, incidents: Sequence[Incident]) -> Incident | None:
    """Return what stood still when the newest job was killed together with whoever would have written it down.

    None where it runs, has told its end, or nothing is known to have stood still.
    """
    state = view.state
    if state.attempt is None or state.attempt_ended or state.last_event_at is None or view.holder is not None:
        return None
    began_at = state.started_at or 0.0
    told = [e for e in view.events if (e.get("job"), e.get("attempt")) == (state.job, state.attempt)]
    told = [e for e in told if e["t"] >= began_at]
    known = [i for i in incidents if i.attempt == state.attempt and (i.detected_at or 0.0) >= began_at]
    ended = [(e.get("rank"), float(e["t"])) for e in told if e["event"] == Event.RANK_EXIT.value]
    exits = {rank: at for rank, at in ended if isinstance(rank, int)}
    stall = stall_at(told, state.last_event_at, ended=exits)
    if stall is None or any(i.kind == "hang" and i.recovered_at is None for i in known):
        return None
    return stall.hang(state.attempt, state.last_event_at, "its launcher was killed too, and told nothing")


def untold_words(hang: Incident) -> str:
    """Return that in one sentence."""
    return f"The job was killed while {one_line(standing_words(hang))}; it has no incident of that."


def step_time_words(seconds: float) -> str:
    """Return the time of a step in its unit."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
