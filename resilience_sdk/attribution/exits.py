"""Exits.

The meaning of an exit code, a signal and the exception left behind, and what must work again before the next attempt.
Pure.

Which one of them failed is told by the cause; its name is taken from the words of the error, where they give it.

The caller knows what this module cannot: whether the launcher itself sent the signal, and who died first
(see `first_death`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from typing import Any

import attrs

from resilience_sdk.attribution.exceptions import ExceptionRecord, match_exception, message_of, own_exception, type_of
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.incidents.record import Evidence

EXCLUDE_NODE = "exclude_node"
_SHELL_SIGNAL_BASE = 128  # a shell in between reports death by signal n as 128 + n
_MOST_QUOTED = 500
# Signal -> (cause, confidence). SIGKILL is told apart by memory evidence below.
_SIGNALS: dict[int, tuple[str, float]] = {
    signal.SIGSEGV: ("rank_segfault", 0.9),
    signal.SIGBUS: ("rank_bus_error", 0.8),
    signal.SIGABRT: ("rank_abort", 0.5),  # often a watchdog that gave up on a dead peer
    signal.SIGTERM: ("preemption_sigterm", 0.6),
    signal.SIGINT: ("user_interrupt", 0.8),
    signal.SIGQUIT: ("user_interrupt", 0.6),
    signal.SIGHUP: ("user_interrupt", 0.4),
}
# Exit codes that mean something by convention, when no exception was recorded.
_CODES: dict[int, tuple[str, float, str]] = {
    0: ("no_fault", 0.9, "exit code 0"),
    2: ("user_config_error", 0.5, "exit code 2, by convention a bad command line"),
    EXIT_PREEMPTED: (
        "preemption_sigterm",
        0.9,
        f"exit code {EXIT_PREEMPTED}: it left because it was asked to",
    ),
    126: ("environment_error", 0.6, "exit code 126: the program cannot be executed"),
    127: ("environment_error", 0.6, "exit code 127: the program was not found"),
}


@attrs.frozen
class Classification:
    """A cause with its place in the taxonomy, the action, a confidence of 0 to 1 and what supports it.

    `symptom`: the process only noticed that a peer is gone; the cause lies elsewhere. `measured`: it was seen by the
    kernel, a driver or the SDK itself; all else is what a program says, be it in a log or in an exception.
    """

    category: str
    cause: str
    action: str
    confidence: float
    evidence: tuple[Evidence, ...] = ()
    symptom: bool = False
    measured: bool = False

    @property
    def leaves_node_out(self) -> bool:
        """Whether a node is to be left out because of it."""
        return self.action == EXCLUDE_NODE


def classify_exit(
    exit_code: int | None, exception: ExceptionRecord | None = None, cgroup_oom: bool | None = None
) -> Classification:
    """Say why a process ended.

    Args:
        exit_code: As `Popen.returncode`: negative is a signal; None when nobody could collect it.
        exception: The record of the rank's error file, if it left one; it tells more than the exit code,
            because a process with an uncaught exception often dies in its teardown.
        cgroup_oom: Whether the kernel's out-of-memory counter of the job's cgroup moved; None: not known.
    """
    exception = own_exception(exception)
    if exception:
        return _by_exception(exception, exit_code)
    if exit_code is None:
        return classification("unknown", 0.1, Evidence("exit", "the exit code is not known"))
    number = _signal_number(exit_code)
    if number is not None:
        return _by_signal(exit_code, number, cgroup_oom)
    if exit_code in _CODES:
        cause, confidence, text = _CODES[exit_code]
        return classification(cause, confidence, Evidence("exit", text))
    return classification("unknown", 0.2, Evidence("exit", f"exit code {exit_code} and no exception on record"))


def classification(
    cause: str, confidence: float, *evidence: Evidence, symptom: bool = False, measured: bool = False
) -> Classification:
    """Build a classification with the taxonomy's category and default action of `cause`."""
    entry = lookup(cause)
    return Classification(entry.category, entry.cause, entry.action, confidence, evidence, symptom, measured)


def describe_exit(exit_code: int | None) -> str:
    """Return how a process ended in words: `died by SIGKILL`, `exited with code 1`."""
    if exit_code is None:
        return "ended in an unknown way"
    number = _signal_number(exit_code)
    if number is None:
        return f"exited with code {exit_code}"
    through = "" if exit_code < 0 else f" (exit code {exit_code} of a shell)"
    return f"died by {signal_name(number)}{through}"


def _by_exception(exception: ExceptionRecord, exit_code: int | None) -> Classification:
    message = redact_text(message_of(exception))
    quoted = Evidence("exception", f"{type_of(exception) or 'exception'}: {message[:_MOST_QUOTED]}")
    ended = Evidence("exit", describe_exit(exit_code))
    rule = match_exception(exception)
    if rule is not None:
        return classification(rule.cause, rule.confidence, quoted, ended, symptom=rule.symptom)
    # An ordinary exception: the program's own, the surer the more we know where it was raised.
    confidence = 0.8 if exception.get("user_frame") else 0.6
    return classification("user_code_error", confidence, quoted, ended)


def _by_signal(exit_code: int, number: int, cgroup_oom: bool | None) -> Classification:
    ended = Evidence("exit", describe_exit(exit_code))
    sureness = 1.0 if exit_code < 0 else 0.9
    if number == signal.SIGKILL:
        if cgroup_oom:
            told = Evidence("cgroup", "the job's control group counted a kill for memory")
            return classification("host_oom_kill", 0.9 * sureness, ended, told)
        known = "the job's control group counted no kill for memory" if cgroup_oom is False else "no memory evidence"
        confidence = 0.8 if cgroup_oom is False else 0.6
        return classification("rank_killed_sigkill", confidence * sureness, ended, Evidence("cgroup", known))
    cause, confidence = _SIGNALS.get(number, ("unknown", 0.3))
    return classification(cause, confidence * sureness, ended)


def _signal_number(exit_code: int) -> int | None:
    if exit_code < 0:
        return -exit_code
    number = exit_code - _SHELL_SIGNAL_BASE
    # Only what shells commonly report: a program may use 200 for whatever it likes.
    return number if number in _SIGNALS or number == signal.SIGKILL else None


def exit_fields(exit_code: int | None) -> dict[str, Any]:
    """Return `exit_code` and `signal` as the event `rank_exit` has them: one of the two, neither where nobody knows."""
    by_signal = exit_code is not None and exit_code < 0
    name = signal_name(-exit_code) if exit_code is not None and by_signal else None
    return {"exit_code": None if by_signal else exit_code, "signal": name}


def signal_name(number: int) -> str:
    """Return the name of a signal; `signal 40` where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


STORAGE, NAME, PORT = "storage", "name", "port"
_KINDS = {
    "storage_full": STORAGE,
    "storage_io_error": STORAGE,
    "storage_readonly": STORAGE,
    "filesystem_stall": STORAGE,
    "checkpoint_stall": STORAGE,
    "dns_failure": NAME,
    "port_in_use": PORT,
}
_PATTERNS = {
    # OSError ends with the path; torch and C++ programs quote it somewhere.
    STORAGE: (r"\[Errno \d+\][^\n]*?: '(?P<name>/[^'\n]+)'", r"['\"](?P<name>/[^'\"\n]{1,1000})['\"]"),
    NAME: (
        r"getaddrinfo\(\s*'?(?P<name>[\w.-]+)",
        r"host='(?P<name>[\w.-]+)'",
        r"(?i)(?:resolve|host(?:name)?|address)\b[^\w\n]{0,4}(?:host(?:name)?[^\w\n]{1,4})?(?P<name>[\w-]+(?:\.[\w-]+)+)",
    ),
    PORT: (r"(?i)\bport[:= ]+(?P<name>\d{2,5})\b", r"\]?:(?P<name>\d{4,5})\b"),
}
_COMPILED = {kind: tuple(map(re.compile, patterns)) for kind, patterns in _PATTERNS.items()}


@attrs.frozen
class Resource:
    """One thing that failed. `name`: path, host or port; None where the error does not say."""

    kind: str
    name: str | None = None

    def __str__(self) -> str:
        """Return it in words that follow "waiting for"."""
        if self.kind == STORAGE:
            return f"{self.name or 'the run directory'} to take writes"
        if self.kind == NAME:
            return f"the name {self.name or 'of the host'} to resolve"
        return f"port {self.name or 'of the job'} to be free"


def failed_resource(cause: str, texts: Iterable[str]) -> Resource | None:
    """Return what has to work again after a fault of that cause, None where that is nothing that can be tried.

    `texts`: what the error said, the most telling first.
    """
    kind = _KINDS.get(cause)
    if kind is None:
        return None
    for text in texts:
        for pattern in _COMPILED[kind]:
            if found := pattern.search(text):
                return Resource(kind, found["name"])
    return Resource(kind)
