"""What is looked at while a job runs, how often, and what of it is told. Pure: no process, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.health.changes import has_grown, judge_growth, worsened
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import GPU, HOST, KERNEL, NETWORK, Probe

BUDGET = 0.01  # of one core, for all probes and what schedules them
WATCHED: tuple[Probe, ...] = (GPU, HOST, KERNEL, NETWORK)
# Of the host only what a training does not cause by itself; of a GPU not who holds it, for that is the job.
_OF_THE_HOST = frozenset({"memory_available", "oom_kills", "shared_memory", "file_table", "answers"})
_NOT_OF_A_GPU = frozenset({"memory_held"})
_ANSWERS = "answers"
_NO_DRIVER = (GPU.name, "driver")
_LOG = (KERNEL.name, "kernel_log")
_EVENTS = frozenset({"xid", "kernel_log", "oom_kills"})  # happen and are over: each is told, none ends
_SAME_S = 2.0  # of one cause; the kernel's clock is not ours
_LISTENING = "Xid events"

_Key = tuple[str, str, str]


def pause_until_next(
    *, lived_s: float, since_look_s: float, cost_s: float, look_cost_s: float, interval_s: float, budget: float = BUDGET
) -> float:
    """Return the seconds until the next look of a watch that has lived `lived_s`, and last looked `since_look_s` ago.

    It has cost `cost_s` of processor time in all, its start included, and `look_cost_s` at that look: as much as the
    next one will, which must be within the `budget` (part of one core) too.
    """
    return max(0.0, interval_s - since_look_s, (cost_s + look_cost_s) / budget - lived_s)


def worth_another_look(probes: Sequence[Probe], findings: Iterable[Finding]) -> list[Probe]:
    """Return the probes without those for what this node does not have: no driver comes while a job runs."""
    absent = any((finding.probe, finding.check) == _NO_DRIVER and _is_missing(finding) for finding in findings)
    return [probe for probe in probes if not (absent and probe.name == GPU.name)]


def log_was_read(findings: Iterable[Finding]) -> bool:
    """Tell whether a look has read the kernel's log, so that the next one needs only what is newer."""
    return any((finding.probe, finding.check) == _LOG and not _is_missing(finding) for finding in findings)


@attrs.define
class Watch:
    """What is known of this node, look by look."""

    _known: dict[_Key, Finding] = attrs.field(factory=dict)
    _open: set[_Key] = attrs.field(factory=set)
    """What was told to be bad, and not yet to be in order again."""

    @classmethod
    def resumed(cls, events: Iterable[Mapping[str, Any]]) -> Watch:
        """Return a watch that knows what an earlier one of the same job has told, from its `health` events.

        What is bad still is no news then, and what is in order again is.
        """
        watch = cls()
        for event in events:
            try:
                finding = _from_event(event)
            except (KeyError, TypeError, ValueError):
                continue  # of another version
            key = _key(finding)
            # Of a counter nobody knows when between the two watches it grew.
            watch._known[key] = finding if _happens(finding) else attrs.evolve(finding, value=None)
            if not _happens(finding):
                (watch._open.add if _is_bad(finding) else watch._open.discard)(key)
        return watch

    def take(self, findings: Sequence[Finding], seconds: float) -> list[Finding]:
        """Return what of a look is news: what became worse, grew too fast, happened, or is in order again.

        `seconds` have passed since the look before. What was bad at the first look is news too.
        """
        seen = [finding for finding in findings if _is_watched(finding)]
        judged = [self._or_lost(finding) for finding in judge_growth(self._known.values(), seen, seconds)]
        lasting = [finding for finding in judged if not _happens(finding)]
        news = [finding for finding in judged if _happens(finding) and _is_bad(finding) and self._is_another(finding)]
        news += worsened(self._known.values(), lasting)
        news += [finding for finding in lasting if self._grows_again(finding)]
        over = [finding for finding in lasting if finding.status is Status.OK and _key(finding) in self._open]
        over += self._hangs_that_are_over(judged)
        self._known.update((_key(finding), finding) for finding in [*judged, *over])
        self._open.update(_key(finding) for finding in news if not _happens(finding))
        self._open.difference_update(_key(finding) for finding in over)
        return news + over

    def _or_lost(self, finding: Finding) -> Finding:
        """Return a finding, degraded where it is of a link that worked before: at a first look it is one of no use."""
        key = _key(finding)
        known = self._known.get(key)
        if finding.data.get("works") is not False or _is_bad(finding) or known is None:
            return finding
        if not known.data.get("works") and key not in self._open:
            return finding
        evidence = f"its link was lost while the job ran; {finding.evidence}"
        return attrs.evolve(finding, status=Status.DEGRADED, evidence=evidence, cure=finding.data["lost"])

    def _is_another(self, finding: Finding) -> bool:
        """Tell whether what has happened is not what was told before, and only seen again."""
        known = self._known.get(_key(finding))
        if known is None:
            return True
        if (at := finding.data.get("at")) is not None:
            before = known.data.get("at")
            return before is None or at > before + _SAME_S
        return "growth" not in finding.data or finding.value != known.value  # a counter that was reset has grown too

    def _grows_again(self, finding: Finding) -> bool:
        """Tell whether a counter grew too fast that was bad before, so that its status tells nothing new."""
        known = self._known.get(_key(finding))
        return known is not None and _is_bad(known) and has_grown(finding) and not has_grown(known)

    def _hangs_that_are_over(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return, as in order, the hangs of probes that answer again: themselves they say nothing of having hung.

        A GPU that is not even named any more is not back.
        """
        told = {_key(finding) for finding in findings}
        # Of a GPU's events another process tells, which listens; of the kernel's the probe itself, and of nothing else.
        answered = {
            probe for probe, check, _ in told if check != _ANSWERS and (check not in _EVENTS or probe == KERNEL.name)
        }
        heard = {probe for probe, check, _ in told if check in _EVENTS}
        return [
            attrs.evolve(self._known[key], status=Status.OK, value=None, evidence="answers again", cure="")
            for key in sorted(self._open - told)
            if key[1] == _ANSWERS
            and ((key[2] == "" and key[0] in answered) or (key[2] == _LISTENING and key[0] in heard))
        ]


def to_event(finding: Finding, *, lasts: bool = False) -> dict[str, Any]:
    """Return the fields of the journal's `health` event of a finding.

    `lasts`: its end will be told. What was looked at only once, or has happened and is over, is no state of the node.
    """
    return {
        "lasts": lasts and not _happens(finding),
        "at": finding.data.get("at"),
        "what": " ".join(part for part in (finding.probe, finding.check, finding.subject) if part),
        "ok": not _is_bad(finding),
        "why": finding.evidence or None,
        "probe": finding.probe,
        "check": finding.check,
        "subject": finding.subject,
        "status": finding.status.value,
        "value": finding.value,
        "unit": finding.unit,
        "threshold": finding.threshold,
        "cure": finding.cure or None,
        "cause": finding.data.get("cause"),
    }


@attrs.frozen(kw_only=True)
class Sign:
    """A health event near an incident; `after_s` is negative where it came before."""

    after_s: float
    event: Mapping[str, Any]

    @property
    def before(self) -> bool:
        """Tell whether the sign was there before the incident was."""
        return self.after_s <= 0


def signs_near(
    at: float, events: Iterable[Mapping[str, Any]], *, before_s: float = 600.0, after_s: float = 300.0
) -> list[Sign]:
    """Return the bad health events around an incident at Unix time `at`: what has failed first, then the nearest.

    The window is that in which Meta's study of its clusters attributes a failure to a health check: 10 minutes before
    to 5 minutes after.
    """
    signs = [
        Sign(after_s=_when(event) - at, event=event)
        for event in events
        if event.get("event") == "health" and event.get("ok") is False and -before_s <= _when(event) - at <= after_s
    ]
    return sorted(signs, key=lambda sign: (sign.event.get("status") != Status.FAILED, abs(sign.after_s)))


def _when(event: Mapping[str, Any]) -> float:
    """Return when it happened, which may be long before somebody looked; else when it was seen. Unix seconds."""
    at = event.get("at")
    return float(at if isinstance(at, (int, float)) else event["t"])


def _from_event(event: Mapping[str, Any]) -> Finding:
    at = event.get("at")
    return Finding(
        probe=str(event["probe"]),
        check=str(event["check"]),
        subject=str(event["subject"]),
        status=event["status"],
        value=event.get("value"),
        data={"at": at} if isinstance(at, (int, float)) else {},
    )


def _happens(finding: Finding) -> bool:
    return finding.check in _EVENTS


def _is_watched(finding: Finding) -> bool:
    if finding.check == "probe":
        return False  # our own mistake is for the preflight to tell
    if finding.probe == HOST.name:
        return finding.check in _OF_THE_HOST
    return not (finding.probe == GPU.name and finding.check in _NOT_OF_A_GPU)


def _is_missing(finding: Finding) -> bool:
    return finding.status is Status.UNAVAILABLE


def _is_bad(finding: Finding) -> bool:
    return finding.status in (Status.DEGRADED, Status.FAILED)


def _key(finding: Finding) -> _Key:
    return finding.probe, finding.check, finding.subject
