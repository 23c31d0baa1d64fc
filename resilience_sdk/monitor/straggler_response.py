"""What follows when ranks are found to be slow: an event, an incident, a line, a report, and a stop on request."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import console
from resilience_sdk.events import Event
from resilience_sdk.incidents import CURE, Culprit, Evidence, Incident, IncidentStore, event_fields
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.notices import Asked
from resilience_sdk.preemption.asking import Asker
from resilience_sdk.straggler.advice import advice
from resilience_sdk.straggler.control import Control
from resilience_sdk.straggler.published import (
    CHANGES_KEPT,
    Numbered,
    Standing,
    is_logging,
    remove_standing,
    write_report,
    write_standing,
)
from resilience_sdk.straggler.reports import Named, Report
from resilience_sdk.straggler.verdicts import OVER, TRANSIENT, Change, Verdict

SOURCE = "straggler"
"""The source of a notice that asks for the stop."""
LASTING_S = 10.0
"""So long a slow-down has lasted before there is an incident. Steps alone do not tell: 48 of 10 ms are half a second,
in which a neighbour on the machine compiles something."""
SURE = 0.6
"""The least confidence of a verdict for which the job is stopped. The waits must not contradict either."""
_STRAGGLERS_JOURNALLED = 64
_RANKS_JOURNALLED = 64


class StragglerResponse:
    """Acts on changes and reports. The monitor's only thread; a full disk costs what is written, nothing else."""

    def __init__(
        self,
        run_dir: Path,
        journal: Journal,
        store: IncidentStore,
        ask_stop: Callable[[Asked | None], None],
        *,
        job: str,
        began: float,
    ) -> None:
        """Write into `run_dir` for the job of that key; incidents from before `began` (Unix seconds) are of another."""
        self._run_dir = run_dir
        self._journal = journal
        self._store = store
        self._ask_stop = ask_stop
        self._job = job
        self._began = began
        self._clear(0)

    def begin(self, attempt: int) -> None:
        """Begin an attempt: nobody is known to be slow in it."""
        self._clear(attempt)
        self._ask_stop(None)
        self._publish((), enabled=True)

    def _clear(self, attempt: int) -> None:
        self._attempt = attempt
        self._count = 0
        self._changes: deque[Numbered] = deque(maxlen=CHANGES_KEPT)
        self._incidents: dict[object, str | None] = {}
        self._has_asked = False
        self._shown: frozenset[Named] = frozenset()

    def tell(self, changes: Sequence[Change], verdicts: tuple[Verdict, ...], *, stop: bool) -> None:
        """Act on what has changed, and on `verdicts`, which stand; `stop`: on request of who runs the job, all stop."""
        for change in changes:
            self._count += 1
            self._changes.append(Numbered(self._count, change.what, change.verdict))
            self._journal.emit(
                Event.STRAGGLER, step=change.verdict.last_step, what=change.what, **_facts(change.verdict)
            )
            if change.what == OVER:
                self._close(change.verdict)
        for verdict in verdicts:
            if _lasts(verdict):
                self._open(verdict, stop=stop)
        if changes:
            self._publish(verdicts, enabled=True)

    def report(self, report: Report, scores_to_print: int) -> None:
        """Print a report, unless a rank logs it; journal what it comes to, and publish it."""
        if not is_logging(self._run_dir, self._job, self._attempt):
            self._print(report, scores_to_print)
        self._journal.emit(
            Event.STRAGGLER,
            step=report.last_step,
            what="report",
            ranks=report.ranks,
            first_step=report.first_step,
            stragglers=[attrs.asdict(straggler) for straggler in report.stragglers[:_STRAGGLERS_JOURNALLED]],
            verdicts=len(report.verdicts),
            scores=report.summary(),
            processing_s=report.processing_s,
        )
        self._write(lambda: write_report(self._run_dir, report))

    def _print(self, report: Report, scores_to_print: int) -> None:
        """Print the scores where somebody is named who was not before, else the line of the report and who is slow.

        Who comes and goes has been named: until nobody is slow any more the scores are printed once for each.
        """
        named, news = report.named, report.named - self._shown
        self._shown = self._shown | named if named else frozenset()
        if scores_to_print and not news:
            console.say(f"straggler report: {report.line()} (the scores: resilience straggler {self._run_dir})")
        if text := report.text(scores_to_print if news else 0):
            console.say(text)

    def note_control(self, said: str, control: Control) -> None:
        """Note that somebody has changed the settings, or tried to."""
        self._journal.emit(Event.STRAGGLER, what="settings", text=said, settings=attrs.asdict(control))

    def withdraw(self) -> None:
        """Take back what stands in the run directory: a job that was requeued has the key of the one before it."""
        self._write(lambda: remove_standing(self._run_dir))

    def switched_off(self) -> None:
        """Publish that nobody is compared."""
        self._publish((), enabled=False)

    def note_failure(self, error: Exception) -> None:
        """Say that nobody is compared any more in this attempt."""
        self._journal.emit(Event.DEGRADED, what="stragglers", why="".join(traceback.format_exception(error)))
        console.say_once("straggler failed", f"slow ranks are not found any more: {type(error).__name__}: {error}")

    def _open(self, verdict: Verdict, *, stop: bool) -> None:
        """Write the incident of a verdict that lasts, once, and ask for the stop."""
        stop = stop and _is_worth_a_stop(verdict)
        key = _identity(verdict)
        if key not in self._incidents:
            self._incidents[key] = self._known(verdict) or self._create(verdict, stop=stop)
        if stop and not self._has_asked:
            self._has_asked = True
            incident, node = self._incidents[key], verdict.nodes[0] if verdict.nodes else None
            self._ask_stop(Asked(SOURCE, Asker.STRAGGLER, reason=verdict.text(), incident=incident, node=node))
            console.say(f"  all ranks save and stop, so that the job goes on without node {node} (stop_if_detected)")

    def _create(self, verdict: Verdict, *, stop: bool) -> str | None:
        console.say(f"SLOW: {verdict.text()}")
        incident = slow_incident(verdict, attempt=self._attempt, stop=stop, now=time.time())
        try:
            incident = self._store.create("slow", incident)
        except OSError as error:
            console.say_once("incident", f"cannot write the incident into {self._store.path}: {error}")
        self._journal.emit(Event.INCIDENT, **event_fields(incident))
        return incident.id

    def _known(self, verdict: Verdict) -> str | None:
        """Return the incident where it is written already: by the monitor before this one, or by another node's."""
        try:
            incidents: Iterable[Incident] = self._store.all()
        except OSError:
            return None
        for incident in incidents:
            is_open = incident.kind == "slow" and incident.recovered_at is None and incident.attempt == self._attempt
            same = [c.rank for c in incident.culprits] == list(verdict.ranks if not verdict.is_global else ())
            is_ours = incident.id not in self._incidents.values()
            is_this = is_open and same and is_ours and (incident.detected_at or 0.0) >= self._began
            if is_this and _names(incident, verdict):
                return incident.id
        return None

    def _close(self, verdict: Verdict) -> None:
        incident = self._incidents.pop(_identity(verdict), None)
        if incident is None:
            return
        console.say(f"no longer slow: {verdict.text()}")
        try:
            closed = self._store.mark_recovered(incident, time.time())
        except (OSError, KeyError) as error:
            console.say_once("recovery", f"cannot note the recovery in incident {incident}: {error}")
            return
        self._journal.emit(Event.RECOVERED, id=incident, recovery_s=closed.recovery_s)

    def _publish(self, verdicts: tuple[Verdict, ...], *, enabled: bool) -> None:
        standing = Standing(self._attempt, time.time(), enabled, verdicts, tuple(self._changes), self._job)
        self._write(lambda: write_standing(self._run_dir, standing))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if console.say_once("stragglers", f"cannot publish who is slow in {self._run_dir}: {error}"):
                self._journal.emit(Event.DEGRADED, what="stragglers", why=str(error))


def slow_incident(verdict: Verdict, *, attempt: int, stop: bool, now: float) -> Incident:
    """Return the incident of a verdict; `stop`: the job is stopped for it. `now` is Unix time in seconds."""
    nodes = verdict.nodes if len(verdict.nodes) == len(verdict.ranks) else verdict.nodes[:1] * len(verdict.ranks)
    named = () if verdict.is_global else tuple(zip(verdict.ranks, nodes, strict=False))
    return Incident(
        attempt=attempt,
        detected_at=now,
        detection_latency_s=_stood_s(verdict),
        culprits=tuple(Culprit(rank, node, verdict.since_step, verdict.section) for rank, node in named),
        category="unknown" if verdict.is_global else "slow",
        cause="unknown" if verdict.is_global else "straggler_persistent",
        action="exclude_node" if stop else "none",
        confidence=verdict.confidence,
        evidence=(Evidence(SOURCE, verdict.text()), Evidence(CURE, advice(verdict, stop=stop))),
    )


def _stood_s(verdict: Verdict) -> float | None:
    """Return since when it is slow, in seconds; None where the length of a step is not known."""
    steps = 1 + verdict.last_step - verdict.since_step
    return steps * verdict.excess_s / verdict.share if verdict.share > 0.0 else None


def _lasts(verdict: Verdict) -> bool:
    stood_s = _stood_s(verdict)
    return verdict.kind != TRANSIENT and (stood_s is None or stood_s >= LASTING_S)


def _is_worth_a_stop(verdict: Verdict) -> bool:
    """Tell whether a verdict names somebody, surely enough, without whom the others would not wait."""
    return (
        bool(verdict.ranks)
        and not verdict.is_global
        and verdict.confidence >= SURE
        and verdict.waits_least is not False
    )


def _names(incident: Incident, verdict: Verdict) -> bool:
    words = (f": {verdict.where} is ", f": {verdict.where} takes ")
    return any(word in evidence.text for evidence in incident.evidence for word in words)


def _identity(verdict: Verdict) -> object:
    """Return what stays the same as long as a verdict stands."""
    whom: object = verdict.ranks
    if verdict.is_global or verdict.whole_node:
        whom = verdict.nodes[:1] if verdict.whole_node else None
    return verdict.section, verdict.section_kind, verdict.role, whom


def _facts(verdict: Verdict) -> dict[str, Any]:
    facts = attrs.asdict(verdict)
    return {**facts, "ranks": facts["ranks"][:_RANKS_JOURNALLED], "text": verdict.text()}
