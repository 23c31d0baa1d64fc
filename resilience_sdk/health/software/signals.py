"""Whether the signals that the SDK works with are free: not blocked, not ignored, not somebody else's."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping

import attrs

from resilience_sdk import kernel_files
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.settings import Settings
from resilience_sdk.settings.parse import signal_name, signal_number

PROBE = "signals"
# Whose these are in practice: a second user makes the first one deaf.
TAKEN = {
    "SIGUSR1": "NCCL and Lightning's requeue under Slurm",
    "SIGUSR2": "submitit's requeue and many programs' own dumps",
}


@attrs.frozen
class Dispositions:
    """What a process does with signals, by their names. `handlers` says who handles one, where that can be told."""

    blocked: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    handlers: Mapping[str, str] = attrs.field(factory=dict)


def dispositions(root: str = "/") -> Dispositions:
    """Return those of this process; in any thread."""
    status = kernel_files.fields(kernel_files.below(root, "/proc/self/status"), ":")
    handlers = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            handlers[signal_name_of(number)] = _who(handler)
        elif handler is None:
            handlers[signal_name_of(number)] = ""  # installed by something that is not Python
    return Dispositions(_names(status.get("SigBlk")), _names(status.get("SigIgn")), handlers)


def signals(settings: Settings, found: Dispositions) -> Iterator[Finding]:
    """Yield a finding for each signal that will not do what it is for, or one that all will. Pure."""
    uses = {name: "preempt_signals" for name in settings.preempt_signals}
    if settings.dump_signal:
        uses[signal_name(settings.dump_signal)] = "dump_signal"
    is_fine = True
    for name, setting in uses.items():
        problem, cure = _problem(name, setting, found)
        if problem:
            is_fine = False
            yield Finding(
                probe=PROBE,
                check="signal",
                subject=name,
                status=Status.DEGRADED,
                value=setting,
                evidence=problem,
                cure=cure,
            )
    if is_fine:
        names = ", ".join(uses)
        yield Finding(probe=PROBE, check="signal", status=Status.OK, evidence=f"{names} are free to be handled")


def _problem(name: str, setting: str, found: Dispositions) -> tuple[str, str]:
    """Return what is wrong with a signal, and the cure; two empty texts where nothing is."""
    if name in found.blocked:
        return (
            "it is blocked in this process and in all that it starts: it never arrives",
            "find who blocks it before the job (`grep SigBlk /proc/PID/status` up the process tree)",
        )
    if name in found.ignored:
        return (
            "whoever started this has it ignored (`nohup`, `trap '' ...`): programs that do not install a handler of "
            "their own are deaf to it",
            f"start without that, or choose another with --{setting.replace('_', '-')}",
        )
    if found.handlers.get(name) == "":
        return (
            "a library outside Python handles it, which cannot be chained: whoever installs last wins",
            f"choose another with --{setting.replace('_', '-')}",
        )
    if setting == "dump_signal" and name in found.handlers and not found.handlers[name].startswith("resilience_sdk"):
        return f"{found.handlers[name]} handles it already", "choose another with --dump-signal, such as SIGRTMAX-3"
    if setting == "dump_signal" and name in TAKEN:
        return f"{TAKEN[name]} use it too", "choose another with --dump-signal, such as SIGRTMAX-3 (the default)"
    return "", ""


def _names(mask: str | None) -> frozenset[str]:
    """Return the signals in a mask of /proc/<pid>/status."""
    try:
        bits = int(mask or "0", 16)
    except ValueError:
        return frozenset()
    return frozenset(signal_name_of(number) for number in signal.valid_signals() if bits >> (number - 1) & 1)


def signal_name_of(number: int) -> str:
    """Return the name of any signal, of those that cannot be handled too."""
    try:
        return signal_name(signal_number(number))
    except ValueError:
        return f"signal {int(number)}"


def _who(handler: object) -> str:
    module = getattr(handler, "__module__", None) or type(handler).__module__
    return f"{module}.{getattr(handler, '__qualname__', type(handler).__qualname__)}"
