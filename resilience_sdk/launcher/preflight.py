"""`--preflight`: looks at this node before any rank exists.

The probes are of the floor of the launcher, so they run by name in a process of their own (`resilience_sdk.health`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.checkpoint.newest import newest_checkpoint
from resilience_sdk.core.console import say
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import thing_words
from resilience_sdk.launcher.job import JobEnd
from resilience_sdk.launcher.options import Options, least_nodes, most_nodes
from resilience_sdk.launcher.restart_policy import Decision
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.launcher.task_programs import answer_of
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.system import programs

_COMES_S = 300.0  # for a rendezvous whose node or name comes up later than this one
_LONGEST_S = 300.0 + _COMES_S  # each probe has a deadline of its own
# What another node may cure: by who looked, or by what was looked at. All else is the same wherever the job is sent.
_PROBES_OF_THE_NODE = frozenset({"compute", "gpu", "kernel", "network"})
_CHECKS_OF_THE_NODE = frozenset({"answers", "memory_available", "reach"})
_CHECKS_OF_THE_JOB = frozenset({"chosen_interface"})
_BAD = ("failed", "degraded")
_RENDEZVOUS = "rendezvous"


@attrs.frozen
class Look:
    """What was found on this node. `refused`: how the job ends here because of it, None when it can start.

    `tells_others`: all nodes are needed, and can be met, so that they are told before this one leaves.
    """

    findings: Sequence[Mapping[str, Any]] = ()
    refused: JobEnd | None = None
    tells_others: bool = False


def preflight(options: Options, run_dir: RunDirectory, local_ranks: int, inbox: SignalInbox, journal: Journal) -> Look:
    """Return what was found on this node, and what follows.

    Says and journals what is wrong. A preflight that fails itself is said, and stops nothing. Main thread.

    Raises:
        LeaveRequested: A signal asked to leave.
    """
    task = {
        "settings": options.settings.to_json(),
        "run_dir": str(run_dir.path),
        "rendezvous": None if options.one_node else options.meeting_point,
        "local_ranks": local_ranks,
        "nodes": 1 if options.one_node else most_nodes(options.elastic),
        "comes_s": _COMES_S,
    }
    try:
        findings, events, faults = _read(answer_of(programs.PREFLIGHT, task, inbox, _LONGEST_S))
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        why = " ".join(str(error).split())[:500]
        say(f"the preflight failed itself, the job starts without: {why}")
        journal.emit(Event.DEGRADED, what="preflight", why=why)
        return Look()
    for fault in faults:
        say(f"preflight: {fault}")
        journal.emit(Event.DEGRADED, what="preflight", why=fault)
    for finding, event in zip(findings, events, strict=True):
        if finding["status"] in _BAD:
            say_finding(finding)
            journal.emit(Event.HEALTH, **event)
    can_spare_it = least_nodes(options.elastic) < most_nodes(options.elastic)
    decision = decide(findings, others_go_on=can_spare_it)
    if decision is None:
        return Look(findings)
    stopping = [finding for finding in findings if _stops(finding)]
    end = JobEnd(decision, attempts=0, what=headline(stopping[0]), incidents=(), checkpoint=newest_checkpoint(run_dir))
    # One that could be done without never comes: to meet it and to lose it again costs the others a minute.
    can_meet = not any(finding["probe"] == _RENDEZVOUS for finding in stopping)
    return Look(findings, end, tells_others=can_meet and not can_spare_it and not options.one_node)


def decide(findings: Sequence[Mapping[str, Any]], *, others_go_on: bool) -> Decision | None:
    """Return what the findings of a preflight mean for the job, None where it can start. Pure."""
    bad = [finding for finding in findings if _stops(finding)]
    if not bad:
        return None
    names = ", ".join(dict.fromkeys(thing_words(finding["probe"], finding["check"]) for finding in bad))
    if any(_is_of_the_node(finding) for finding in bad):
        reason = f"the preflight of this node failed ({names})"
        return Decision(JobVerdict.HARDWARE, reason, others_go_on=others_go_on)
    return Decision(JobVerdict.STOP, f"the preflight found what has to be cured first ({names})")


def headline(finding: Mapping[str, Any]) -> str:
    """Return a finding in one line."""
    thing = thing_words(finding["probe"], finding["check"], finding["subject"], between=": ")
    return f"{thing}: {finding['evidence']}"


def _stops(finding: Mapping[str, Any]) -> bool:
    return bool(finding["must"]) and finding["status"] == "failed"


def _is_of_the_node(finding: Mapping[str, Any]) -> bool:
    check = finding["check"]
    by_probe = finding["probe"] in _PROBES_OF_THE_NODE and check not in _CHECKS_OF_THE_JOB
    return by_probe or check in _CHECKS_OF_THE_NODE


def say_finding(finding: Mapping[str, Any]) -> None:
    """Say a finding that is not as it should be, with its cure."""
    word = "FAILED" if _stops(finding) else finding["status"]
    say(f"preflight: {word}: {headline(finding)}")
    if finding["cure"]:
        say(f"  cure: {finding['cure']}")


def _read(report: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return the findings, for each the event that tells the journal of it, and what faults of the SDK have hidden."""
    try:
        return list(report["findings"]), list(report["events"]), list(report["faults"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"its answer has no {error}") from None
