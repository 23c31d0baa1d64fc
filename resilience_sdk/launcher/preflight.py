"""`--preflight`: looks at this node before any rank exists, by programs that are given a task and tell an answer.

Standard output is no such way: libraries print on it (`NCCL_DEBUG=INFO`), and what the program has forked holds it
open, perhaps in a driver that even SIGKILL does not reach. So the answer has a pipe of its own, and is one line: it is
there once the line has ended, whoever still holds the pipe.

The probes are of the floor of the launcher, so they run by name in a process of their own (`resilience_sdk.health`).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
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
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.system import programs
from resilience_sdk.system.programs import Program

_LOOK_S = 0.1  # how soon it is seen that a program ended without a word
_COLLECT_S = 1.0  # for one that was killed


def answer_of(program: Program, task: Mapping[str, Any], inbox: SignalInbox, longest_s: float) -> Any:
    """Return what a program answers; it finds the task on its standard input, and in it `answer`, a descriptor.

    It is ended, and what it has started with it, once it has answered, or when a signal asks to leave. Main thread.

    Raises:
        OSError, ValueError: It could not be started, or has not answered in time.
        LeaveRequested: A signal asked to leave.
    """
    read, write = os.pipe()
    try:
        process = programs.start(program, task=json.dumps({**task, "answer": write}).encode(), pass_fds=(write,))
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    try:
        with inbox.raising():
            return json.loads(_line(process, read, time.monotonic() + longest_s))
    finally:
        os.close(read)
        programs.kill(process, _COLLECT_S)


def _line(process: subprocess.Popen[bytes], pipe: int, ends: float) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        left_s = ends - time.monotonic()
        if left_s <= 0:
            raise ValueError("its process has not answered in time")
        ended = _ended(process)  # asked first: what it wrote before is in the pipe by now
        if select.select([pipe], [], [], 0.0 if ended else min(_LOOK_S, left_s))[0]:
            piece = os.read(pipe, 1 << 16)
            text += piece
            if piece:
                continue
            if not ended:
                time.sleep(_LOOK_S)  # it has closed its pipe and is about to go
        if ended:
            raise ValueError(f"its process {ended} and without an answer")
    return text


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended, empty while it runs. It stays a zombie, so that its number is its group's."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13; who asks ends the group at once
        code = process.poll()
        return "" if code is None else f"left with {code}" if code >= 0 else f"died by signal {-code}"
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return ""
    return f"left with {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"died by signal {ended.si_status}"


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
