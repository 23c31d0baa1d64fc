"""What is looked at while a job runs, how often, and what of it is told. Pure: no process, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.health.changes import judge_growth, worsened
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
_EVENTS = frozenset({"xid"})  # happen and are over: each is told, none ends

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

    def take(self, findings: Sequence[Finding], seconds: float) -> list[Finding]:
        """Return what of a look is news: what became worse, grew too fast, happened, or is in order again.

        `seconds` have passed since the look before. What was bad at the first look is news too.
        """
        seen = [finding for finding in findings if _is_watched(finding)]
        judged = judge_growth(self._known.values(), seen, seconds)
        lasting = [finding for finding in judged if finding.check not in _EVENTS]
        news = [finding for finding in judged if finding.check in _EVENTS and _is_bad(finding)]
        news += worsened(self._known.values(), lasting)
        news += [
            finding
            for finding in lasting
            if finding.status is Status.OK and (known := self._known.get(_key(finding))) is not None and _is_bad(known)
        ]
        self._forget_hangs(lasting)
        self._known.update((_key(finding), finding) for finding in lasting)
        return news

    def _forget_hangs(self, findings: Iterable[Finding]) -> None:
        """A probe that answers again says nothing of having hung: its next hang is news."""
        told = {_key(finding) for finding in findings}
        answered = {probe for probe, _, _ in told}
        for key in [key for key in self._known if key[1] == _ANSWERS and key not in told and key[0] in answered]:
            del self._known[key]


def to_event(finding: Finding) -> dict[str, Any]:
    """Return the fields of the journal's `health` event of a finding."""
    return {
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
        Sign(after_s=event["t"] - at, event=event)
        for event in events
        if event.get("event") == "health" and event.get("ok") is False and -before_s <= event["t"] - at <= after_s
    ]
    return sorted(signs, key=lambda sign: (sign.event.get("status") != Status.FAILED, abs(sign.after_s)))


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
