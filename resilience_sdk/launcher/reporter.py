"""Writes down what an ended attempt means: incidents and what was found out about it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

import attrs

from resilience_sdk.attribution.exits import classification
from resilience_sdk.attribution.first_death import FirstDeath
from resilience_sdk.attribution.taxonomy import meaning
from resilience_sdk.console import say_once
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.events import Event
from resilience_sdk.incidents import Evidence, Incident, IncidentStore
from resilience_sdk.journal import Journal
from resilience_sdk.launcher import evidence
from resilience_sdk.launcher.decision import AttemptEnd, EndedBy
from resilience_sdk.launcher.evidence import Facts
from resilience_sdk.rank_page import snapshot_to_json
from resilience_sdk.run_directory import RunDirectory


@attrs.frozen
class Finding:
    """What an attempt's end came to: for the decision, for the screen, and the incident's id."""

    end: AttemptEnd
    headline: str
    incident: str | None = None


class Reporter:
    """Turns the facts of an ended attempt into an incident and a finding. Never raises for a full disk."""

    def __init__(self, run_dir: RunDirectory, journal: Journal) -> None:
        """Write into `run_dir`; events go to `journal`."""
        self._store = IncidentStore(run_dir.path, explain=meaning)
        self._journal = journal

    def conclude(self, facts: Facts, verdict: Mapping[str, object] | None, first_ns: int | None) -> Finding:
        """Conclude an attempt; `verdict` is the monitor's, when a hang ended it."""
        if facts.ended_by is EndedBy.HANG:
            return self._after_hang(facts, str((verdict or {}).get("incident") or ""))
        first = evidence.first_death(facts)
        end = evidence.attempt_end(facts, first)
        if facts.ended_by is EndedBy.INTERRUPT:
            return Finding(end, "interrupted by the user")
        left = end.stop_agreed or EXIT_PREEMPTED in end.exit_codes.values()
        if facts.ended_by is EndedBy.PREEMPTION or (left and not first.culprits):
            return Finding(end, "the job was asked to leave", self._preemption(facts, end))
        if not any(end.exit_codes.values()):
            return Finding(end, "all ranks exited with 0")
        now = time.time()
        latency = None if first_ns is None else max(0.0, (time.monotonic_ns() - first_ns) / 1e9)
        incident = evidence.crash_incident(facts, first, now, latency)
        return Finding(end, evidence.headline(facts, first), self._write("crash", incident, facts))

    def _after_hang(self, facts: Facts, incident_id: str) -> Finding:
        """Take over what the monitor found; the deaths are its doing."""
        found: Incident | None = None
        with contextlib.suppress(KeyError, OSError):
            found = self._store.get(incident_id)
        cause = found.cause if found is not None and found.cause else "unknown"
        known = classification(cause, found.confidence or 0.0 if found is not None else 0.0)
        end = evidence.attempt_end(facts, FirstDeath((), (), known))
        if found is not None and found.action:
            end = attrs.evolve(end, action=found.action, category=found.category or "hang")
        who = ", ".join(f"rank {culprit.rank}" for culprit in found.culprits[:4]) if found else ""
        told = f"the job hung ({who or 'no rank can be named'}: {known.cause})"
        return Finding(end, told, incident_id or None)

    def _preemption(self, facts: Facts, end: AttemptEnd) -> str | None:
        """Record that the job left; not twice, should the ranks have recorded it."""
        try:
            for known in self._store.all():
                if known.kind == "preemption" and known.attempt == facts.attempt:
                    return known.id
        except OSError:
            return None
        told = "no checkpoint was completed in this attempt"
        if end.made_checkpoint:
            told = f"saved: the checkpoint after step {end.checkpoint_after}"
        codes = ", ".join(f"rank {rank}: {code}" for rank, code in sorted(end.exit_codes.items())[:16])
        known_cause = classification("preemption_sigterm", 0.9)
        incident = Incident(
            kind="preemption",
            attempt=facts.attempt,
            detected_at=time.time(),
            category=known_cause.category,
            cause=known_cause.cause,
            action=known_cause.action,
            confidence=known_cause.confidence,
            evidence=(Evidence("checkpoint", told), Evidence("exit", f"exit codes: {codes or 'none'}")),
        )
        return self._write("preemption", incident, facts)

    def _write(self, kind: str, incident: Incident, facts: Facts) -> str | None:
        pages = {r: snapshot_to_json(t.snapshot) for r, t in facts.traces.items() if t.snapshot is not None}
        stacks = {r: t.stacks for r, t in facts.traces.items() if t.stacks}
        for rank, trace in facts.traces.items():
            frames = (trace.exception or {}).get("frames")
            if isinstance(frames, list):
                raised = "\n".join(["raised at, innermost first:", *map(str, frames)])
                stacks[rank] = f"{raised}\n\n{stacks.get(rank, '')}".rstrip() + "\n"
        try:
            written = self._store.create(kind, incident, stacks, pages)
        except OSError as error:
            say_once("incident", f"the incident cannot be written: {error}")
            self._journal.emit(Event.DEGRADED, what="incident", why=str(error))
            return None
        self._journal.emit(
            Event.INCIDENT,
            incident=written.id,
            kind=kind,
            culprits=[culprit.rank for culprit in written.culprits],
            cause=written.cause,
            category=written.category,
            action=written.action,
        )
        return written.id
