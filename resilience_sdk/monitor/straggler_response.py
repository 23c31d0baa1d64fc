"""The response to slow ranks.

An event, an incident, a line, a report, and a stop on request or below a user's threshold.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import console
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.settings import Settings
from resilience_sdk.incidents import CURE, Culprit, Evidence, Incident, IncidentStore, event_fields
from resilience_sdk.monitor.machine_load import LoadWatch
from resilience_sdk.monitor.notices import LeaveRequest
from resilience_sdk.preemption.reasons import Asker
from resilience_sdk.straggler.published import (
    CHANGES_KEPT,
    StandingVerdicts,
    controlled,
    is_logging,
    remove_standing,
    write_report,
    write_standing,
)
from resilience_sdk.straggler.reports import OVERALL_INDIVIDUAL, OVERALL_RELATIVE, Named, Report, Straggler, advice
from resilience_sdk.straggler.verdicts import OVER, TRANSIENT, Change, SlowVerdict

_SOURCE = "straggler"  # of a notice that asks for the stop
_OVERALL = (OVERALL_RELATIVE, OVERALL_INDIVIDUAL)
_SHOWN = 8
_CONFIDENCE = 0.6


@attrs.frozen
class Below:
    """Who is below a threshold in a report; the worst first, one at least."""

    found: Sequence[Straggler]
    report: Report
    relative: float
    individual: float

    @classmethod
    def of(cls, report: Report, *, relative: float, individual: float) -> Below | None:
        """Return who is below; None: nobody."""
        found = report.below(relative=relative, individual=individual)
        return cls(found, report, relative, individual) if found else None

    @property
    def culprits(self) -> tuple[Straggler, ...]:
        """Each rank that is below, once; empty where most of them are: then none of them is the straggler."""
        of_ranks = {one.rank: one for one in reversed(self.found)}
        if 2 * len(of_ranks) > self.report.ranks > 1:
            return ()
        return tuple(sorted(of_ranks.values(), key=lambda one: one.score))

    @property
    def node(self) -> str | None:
        """The node to leave out; None: there is no such node."""
        return self.culprits[0].node or None if self.culprits else None

    @property
    def text(self) -> str:
        """Who it is, and which setting names that."""
        more = f"; and {len(self.found) - _SHOWN} more scores" if len(self.found) > _SHOWN else ""
        return "; ".join(map(self._one, self.found[:_SHOWN])) + more

    def _one(self, one: Straggler) -> str:
        where = f"rank {one.rank}" + (f" (node {one.node})" if one.node else "")
        what = "over all its sections" if one.rule in _OVERALL else "of its GPU"
        # A short section has a low score by noise alone: a verdict, which asks for the time that is lost, knows better.
        slow_in = [verdict.section for verdict in self.report.verdicts if verdict.section and one.rank in verdict.ranks]
        lowest = f", lowest in section {one.section}" if one.section else ""
        section = f", slow in section {slow_in[0]}" if slow_in else lowest
        if one.rule.endswith("relative"):
            setting, threshold, whom = "stop_below_relative", self.relative, "the fastest rank"
        else:
            setting, threshold, whom = "stop_below_individual", self.individual, "its own best"
        return f"{where}: score {one.score:.2g} {what} against {whom} is below {threshold:g} ({setting}){section}"

    def incident(self, *, attempt: int, now: float) -> Incident:
        """Return the incident; `now` is Unix time in seconds."""
        culprits = self.culprits
        cure = (
            "most ranks are below the threshold, so no node is to blame: look at what has changed for all of them "
            "(data, batch size, code, clocks), or give a lower threshold"
        )
        if culprits:
            cure = (
                f"look at who else uses the processors and devices of rank {culprits[0].rank}, their clocks and "
                "limits; leave its node out"
            )
        return Incident(
            attempt=attempt,
            detected_at=now,
            culprits=tuple(Culprit(one.rank, one.node, self.report.last_step, one.section) for one in culprits),
            category="slow" if culprits else "unknown",
            cause="straggler_persistent" if culprits else "unknown",
            action="exclude_node" if culprits else "stop",
            confidence=_CONFIDENCE,
            evidence=(Evidence(_SOURCE, self.text), Evidence(CURE, cure)),
        )


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
        *,
        job: str,
        began: float,
    ) -> None:
        """Write into `run_dir` for the job of that key; incidents from before `began` (Unix seconds) are of another."""
        self._run_dir = run_dir
        self._journal = journal
        self._store = store
        self._job = job
        self._began = began
        self._load: LoadWatch | None = None
        self._clear(0)

    def begin(self, attempt: int, load: LoadWatch | None = None) -> None:
        """Begin an attempt: nobody is known to be slow in it. `load` tells what the machine has to do with it."""
        self._clear(attempt)
        self._load = load
        self._publish((), enabled=True)

    def _clear(self, attempt: int) -> None:
        self._attempt = attempt
        self._count = 0
        self._changes: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self._incidents: dict[object, str | None] = {}
        self._loads: dict[object, str] = {}
        self._has_asked = False
        self._shown: frozenset[Named] = frozenset()

    def tell(
        self, changes: Sequence[Change], verdicts: tuple[SlowVerdict, ...], now_s: float, *, stop: bool
    ) -> LeaveRequest | None:
        """Act on what has changed, and on `verdicts`, which stand; return the request for a stop of all ranks.

        `stop`: on request of who runs the job there is one, once in an attempt. `now_s` is a steady clock.
        """
        known = dict(self._loads)
        for change in changes:
            verdict = self._with_load(change.verdict)
            self._count += 1
            self._changes.append(Change(change.what, verdict, self._count))
            self._journal.emit(Event.STRAGGLER, step=verdict.last_step, what=change.what, **_facts(verdict))
            if change.what == OVER:
                self._close(verdict)
        if self._load is not None:  # the machine is looked at from when all ranks are slower until they are no longer
            watch = self._load.notice if any(verdict.is_global for verdict in verdicts) else self._load.end
            watch(now_s)
        request = None
        for verdict in filter(_lasts, verdicts):
            is_worth_it = stop and _is_worth_a_stop(verdict)
            self._open(verdict, now_s, stop=is_worth_it)
            if is_worth_it and not self._has_asked:
                request = self._request_stop(verdict)
        if changes or self._loads != known:
            self._publish(tuple(map(self._with_load, verdicts)), enabled=True)
        return request

    def _request_stop(self, verdict: SlowVerdict) -> LeaveRequest:
        self._has_asked = True
        incident, node = self._incidents.get(_identity(verdict)), verdict.nodes[0] if verdict.nodes else None
        console.say(f"  all ranks save and stop, so that the job goes on without node {node} (stop_if_detected)")
        return LeaveRequest(_SOURCE, Asker.STRAGGLER, reason=verdict.text(), incident=incident, node=node)

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

    def stop_below(self, report: Report, *, relative: float, individual: float) -> LeaveRequest | None:
        """Return the request for a stop, once in an attempt, where a rank's score is below its user's threshold."""
        below = None if self._has_asked else Below.of(report, relative=relative, individual=individual)
        if below is None:
            return None
        self._has_asked = True
        text, node, incident = below.text, below.node, self._incident_below(below)
        console.say(f"SLOW: {text}")
        console.say("  all ranks save and stop" + (f", so that the job goes on without node {node}" if node else ""))
        return LeaveRequest(_SOURCE, Asker.STRAGGLER, reason=text, incident=incident, node=node)

    def _incident_below(self, below: Below) -> str | None:
        """Return the incident of the rank below a threshold: that of its verdict, which is told so, or a new one."""
        made = below.incident(attempt=self._attempt, now=time.time())
        ranks = {one.rank for one in below.culprits}
        of_verdicts = (self._incidents.get(_identity(one)) for one in below.report.verdicts if ranks & set(one.ranks))
        known = next((incident for incident in of_verdicts if incident is not None), None)
        if known is not None:
            try:
                evidence = (*self._store.get(known).observed, *made.evidence)
                return self._store.update(known, action=made.action, evidence=evidence).id
            except (OSError, KeyError) as error:
                console.say_once("incident", f"cannot write the incident into {self._store.path}: {error}")
        return self._create(made)

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

    def note_control(self, said: str, settings: Settings) -> None:
        """Note that somebody has changed the settings, or tried to."""
        self._journal.emit(Event.STRAGGLER, what="settings", text=said, settings=controlled(settings))

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

    def note_stepless(self, rank: int, age_s: float) -> None:
        """Say, once, that a rank of this age in seconds passes through sections and has completed no step."""
        why = f"rank {rank} has completed no step in {age_s:.0f} s, as a heartbeat or a step of an optimizer tells it"
        words = f"slow ranks are looked for from the first completed step on, and {why}: call heartbeat() in the loop"
        if console.say_once("stepless", words):
            self._journal.emit(Event.DEGRADED, what="stragglers", why=why)

    def _open(self, verdict: SlowVerdict, now_s: float, *, stop: bool) -> None:
        """Write the incident of a verdict that lasts, once, unless the load of the machine explains it."""
        key = _identity(verdict)
        if key in self._incidents:
            return
        known, load = self._known(verdict), ""
        if known is None and verdict.is_global and self._load is not None:
            told = self._load.look(verdict, now_s)
            if told is None:
                return  # it is watched for some seconds first
            if told.explains:
                self._tell_load(verdict, told.text)
                return
            load = told.text
            self._loads.pop(key, None)
        if known is None:
            console.say(f"SLOW: {verdict.text()}" + (f"; the machine meanwhile: {load}" if load else ""))
            known = self._create(slow_incident(verdict, attempt=self._attempt, stop=stop, now=time.time(), load=load))
        self._incidents[key] = known

    def _tell_load(self, verdict: SlowVerdict, load: str) -> None:
        """Say that the machine has no time for the training; there is no incident, since nothing is wrong with it."""
        key = _identity(verdict)
        is_new, self._loads[key] = key not in self._loads, load
        if is_new:
            verdict = self._with_load(verdict)
            console.say(f"SLOW: {verdict.text()}")
            self._journal.emit(Event.STRAGGLER, step=verdict.last_step, what="load", **_facts(verdict))

    def _with_load(self, verdict: SlowVerdict) -> SlowVerdict:
        return attrs.evolve(verdict, load=self._loads.get(_identity(verdict), ""))

    def _create(self, incident: Incident) -> str | None:
        try:
            incident = self._store.create("slow", incident)
        except OSError as error:
            console.say_once("incident", f"cannot write the incident into {self._store.path}: {error}")
        self._journal.emit(Event.INCIDENT, **event_fields(incident))
        return incident.id

    def _known(self, verdict: SlowVerdict) -> str | None:
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

    def _close(self, verdict: SlowVerdict) -> None:
        key = _identity(verdict)
        incident, load = self._incidents.pop(key, None), self._loads.pop(key, None)
        if incident is None and load is None:
            return
        console.say(f"no longer slow: {verdict.text()}")
        if incident is None:
            return
        try:
            closed = self._store.mark_recovered(incident, time.time())
        except (OSError, KeyError) as error:
            console.say_once("recovery", f"cannot note the recovery in incident {incident}: {error}")
            return
        self._journal.emit(Event.RECOVERED, id=incident, recovery_s=closed.recovery_s)

    def _publish(self, verdicts: tuple[SlowVerdict, ...], *, enabled: bool) -> None:
        standing = StandingVerdicts(self._attempt, time.time(), enabled, verdicts, tuple(self._changes), self._job)
        self._write(lambda: write_standing(self._run_dir, standing))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if console.say_once("stragglers", f"cannot publish who is slow in {self._run_dir}: {error}"):
                self._journal.emit(Event.DEGRADED, what="stragglers", why=str(error))


def slow_incident(verdict: SlowVerdict, *, attempt: int, stop: bool, now: float, load: str = "") -> Incident:
    """Return the incident of a verdict; `stop`: the job is stopped for it. `now` is Unix time in seconds.

    `load`: what the machine does meanwhile, where that was looked at.
    """
    meanwhile = (Evidence("load", f"{load}: that does not explain it"),) if load else ()
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
        evidence=(Evidence(_SOURCE, verdict.text()), *meanwhile, Evidence(CURE, advice(verdict, stop=stop))),
    )


def _stood_s(verdict: SlowVerdict) -> float | None:
    """Return since when it is slow, in seconds; None where the length of a step is not known."""
    steps = 1 + verdict.last_step - verdict.since_step
    return steps * verdict.excess_s / verdict.share if verdict.share > 0.0 else None


def _lasts(verdict: SlowVerdict) -> bool:
    stood_s = _stood_s(verdict)
    return verdict.kind != TRANSIENT and (stood_s is None or stood_s >= LASTING_S)


def _is_worth_a_stop(verdict: SlowVerdict) -> bool:
    """Tell whether a verdict names somebody, surely enough, without whom the others would not wait."""
    return (
        bool(verdict.ranks)
        and not verdict.is_global
        and verdict.confidence >= SURE
        and verdict.waits_least is not False
    )


def _names(incident: Incident, verdict: SlowVerdict) -> bool:
    words = (f": {verdict.where} is ", f": {verdict.where} takes ")
    return any(word in evidence.text for evidence in incident.evidence for word in words)


def _identity(verdict: SlowVerdict) -> object:
    """Return what stays the same as long as a verdict stands."""
    whom: object = verdict.ranks
    if verdict.is_global or verdict.whole_node:
        whom = verdict.nodes[:1] if verdict.whole_node else None
    return verdict.section, verdict.section_kind, verdict.role, whom


def _facts(verdict: SlowVerdict) -> dict[str, Any]:
    facts = attrs.asdict(verdict)
    return {**facts, "ranks": facts["ranks"][:_RANKS_JOURNALLED], "text": verdict.text()}
