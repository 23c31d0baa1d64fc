"""The runner of probes, and what it says of those that hang, crash or never begin.

They run beside each other, each in a process of its own that is never waited for beyond its deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.json_records import from_values
from resilience_sdk.health.findings import Finding, Status, own_fault, unseen
from resilience_sdk.health.probe_main import BEGUN_LINE, DONE_LINE, FINDING
from resilience_sdk.health.probes import Context, Probe
from resilience_sdk.system import hostinfo, procfs, programs

_MAX_OUTPUT = 1 << 20  # bytes of one probe; more is a probe gone wild
_KILL_GRACE_S = 0.2  # from SIGKILL to calling a process unkillable
_left: list[_Look] = []
"""Those whose process outlived SIGKILL, and so cannot be waited for now."""
_running: set[subprocess.Popen[bytes]] = set()


def run_probes(probes: Sequence[Probe], context: Context, *, limit_s: float | None = None) -> list[Finding]:
    """Return the findings of all probes, in the order of the probes.

    Takes as long as the slowest probe, at most the longest deadline (and `limit_s`, seconds) plus a fraction of a
    second. Starts processes; may be called from any thread of any process but a rank's training thread. Raises
    nothing because of what a probe does.
    """
    collect_left()
    started = [_start(probe, context, limit_s) for probe in probes]
    looks = [look for look in started if isinstance(look, _Look)]
    with selectors.PollSelector() as selector:  # needs no descriptor of its own, of which there may be few
        for look in looks:
            for stream, kept in ((look.process.stdout, look.out), (look.process.stderr, look.err)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, (look, kept))
        while keys := list(selector.get_map().values()):
            for key, _ in selector.select(max(0.0, min(key.data[0].ends for key in keys) - time.monotonic())):
                chunk, kept = os.read(key.fd, 65536), key.data[1]
                kept += chunk[: max(0, _MAX_OUTPUT - len(kept))]
                if not chunk:
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            for key in list(selector.get_map().values()):
                look = key.data[0]
                if look.done or now >= look.ends:
                    look.timed_out = not look.done
                    selector.unregister(key.fileobj)
    _end(looks)
    return [finding for look in started for finding in (look.findings() if isinstance(look, _Look) else [look])]


def kill_running(wait_s: float = 0.0) -> None:
    """Kill the probes that run now, for a process that ends before they do, and collect them. Any thread.

    Takes `wait_s` seconds where one of them cannot be killed.
    """
    until = time.monotonic() + wait_s
    running = list(_running)
    for process in running:
        programs.kill(process, 0.0)
    for process in running:
        programs.kill(process, until - time.monotonic())


def collect_left() -> bool:
    """Collect the processes that were killed and have gone since; tell whether others have not. One thread."""
    _left[:] = [look for look in _left if look.process.poll() is None]
    return bool(_left)


@attrs.define(eq=False)
class _Look:
    """One probe's process, and what it wrote so far."""

    probe: Probe
    deadline_s: float
    started: float
    process: subprocess.Popen[bytes]
    out: bytearray = attrs.field(factory=bytearray)
    err: bytearray = attrs.field(factory=bytearray)
    timed_out: bool = False
    state: str = ""
    waited_s: float = 0.0
    """For how long its process was ready to run, and had no processor."""

    @property
    def ends(self) -> float:
        return self.started + self.deadline_s

    @property
    def done(self) -> bool:
        """Tell whether the probe said that it was done; its process may still hang in its exit."""
        return self.out.endswith(DONE_LINE)

    def findings(self) -> list[Finding]:
        """Return what the probe told, and how it ended where it did not end well."""
        told = []
        for line in bytes(self.out).splitlines():
            with contextlib.suppress(ValueError, TypeError):  # the last line may be cut off by a kill or by the limit
                message = json.loads(line)
                if isinstance(message, dict) and FINDING in message:
                    told.append(from_values(Finding, message[FINDING]))
        if self.done:
            return told
        stderr, has_begun = self.err.decode(errors="replace"), self.out.startswith(BEGUN_LINE)
        if self.timed_out:
            late = hung(self.probe, self.deadline_s, stderr, self.state, has_begun=has_begun, waited_s=self.waited_s)
            return [*told, late]
        ended = crashed if has_begun or self.process.returncode is None else never_began
        return [*told, ended(self.probe, self.process.returncode, stderr)]


def _start(probe: Probe, context: Context, limit_s: float | None) -> _Look | Finding:
    """Start the process of a probe; return why there is none where it cannot, or must not, be started."""
    deadline_s = probe.deadline_s if limit_s is None else min(probe.deadline_s, limit_s)
    started = time.monotonic()
    if (stuck := _stuck(probe)) is not None:
        return still_stuck(probe, stuck.process.pid, started - stuck.started)
    task = {
        "name": probe.name,
        "function": probe.function,
        "ends": started + deadline_s,
        "context": attrs.asdict(attrs.evolve(context, only=probe.only or context.only)),
    }
    try:
        process = programs.start(
            programs.PROBE, task=json.dumps(task).encode(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return not_started(probe, str(error))
    _running.add(process)
    return _Look(probe=probe, deadline_s=deadline_s, started=started, process=process)


def _end(looks: Sequence[_Look]) -> None:
    """Kill what still runs, and give what was killed a moment to go."""
    for look in looks:
        if look.process.poll() is not None:
            look.timed_out = False  # it is gone, and something that it started held its output open
        elif look.timed_out:
            look.state, look.waited_s = _kernel_state(look.process.pid), _waited_s(look.process.pid)
            programs.kill(look.process, 0.0)
    until = time.monotonic() + _KILL_GRACE_S
    for look in looks:
        try:
            look.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            _left.append(look)
        _running.discard(look.process)
        for stream in (look.process.stdout, look.process.stderr):
            assert stream is not None
            stream.close()


def _stuck(probe: Probe) -> _Look | None:
    """Return the look of the same probe, at the same thing, whose process cannot be killed."""
    for look in _left:
        if (look.probe.function, look.probe.only) == (probe.function, probe.only):
            try:
                look.process.wait(_KILL_GRACE_S)  # on a busy machine it may only have been slow to go
            except subprocess.TimeoutExpired:
                return look
    return None


def _kernel_state(pid: int) -> str:
    """Return in which state, and where in the kernel, a process is, in brackets; empty where /proc does not tell."""
    state, where = hostinfo.process_state(pid), procfs.text(Path(f"/proc/{pid}/wchan"))
    if state is None or where is None:
        return ""
    return f" ({state} state" + (f" in {where})" if where not in ("", "0") else ")")


def _waited_s(pid: int) -> float:
    """Return for how many seconds a process has waited for a processor; 0 where the kernel does not count it."""
    counted = (procfs.text(Path(f"/proc/{pid}/schedstat")) or "").split()
    return int(counted[1]) / _NS_PER_S if len(counted) == 3 and counted[1].isdigit() else 0.0


_NS_PER_S = 1e9
_STARVED = 0.5  # of its time that a probe waited for a processor: then nobody knows what it would have seen
_MIN_STARVED_S = 2.0
_NO_START = "this machine is too busy (`--patience 4`), or the file system that Python and its packages are on hangs"


def hung(
    probe: Probe, deadline_s: float, stderr: str, state: str, *, has_begun: bool = True, waited_s: float = 0.0
) -> Finding:
    """Return the finding of a probe that did not end by its deadline; `state` is that of its process (` (D state)`).

    Where it had not even begun to look, or had no processor (for `waited_s`), it is not what it looks at that is late.
    """
    if waited_s >= max(_STARVED * deadline_s, _MIN_STARVED_S):
        evidence = f"no answer within {deadline_s:g} s, of which its process waited {waited_s:.0f} s for a processor"
        return unseen(probe.name, probe.only, evidence, _NO_START)
    places, cure = ", ".join(stuck_in(stderr)), probe.cure
    evidence = f"no answer within {deadline_s:g} s{places and f', stuck in {places}'}{state}"
    if not has_begun:
        evidence, cure = f"{evidence}, and it had not begun to look", _NO_START
    return _ending(probe, evidence, value=deadline_s, unit="s", threshold=deadline_s, cure=cure)


def still_stuck(probe: Probe, pid: int, ago_s: float) -> Finding:
    """Return the finding of a probe that was not started: its process of a look `ago_s` seconds ago does not go."""
    evidence = f"no answer: process {pid}, which looked {ago_s:.0f} s ago, cannot be killed{_kernel_state(pid)}"
    return _ending(probe, evidence)


def crashed(probe: Probe, returncode: int | None, stderr: str) -> Finding:
    """Return the finding of a probe whose process ended before it had told everything."""
    how = "ended without a word, and its process does not go" if returncode is None else f"left with {returncode}"
    if returncode is not None and returncode < 0:
        how = f"was killed by {_signal_name(-returncode)}"
    if places := stuck_in(stderr):
        return _ending(probe, f"the probe {how} in {', '.join(places)}")
    return _ending(probe, f"the probe {how}: {_last_line(stderr)}".removesuffix(": "))


def not_started(probe: Probe, why: str) -> Finding:
    """Return the finding of a probe that the system gave no process, or took it away at once."""
    cure = "it needs processes, memory and file descriptors (`ulimit -u`, `free -m`, `ulimit -n`)"
    return unseen(probe.name, probe.only, f"its process could not be started: {why}", cure)


_UNREADABLE = re.compile(r"(OSError|PermissionError|TimeoutError): \[Errno ")


def never_began(probe: Probe, returncode: int, stderr: str) -> Finding:
    """Return the finding of a probe whose process ended before it began to look: what it looks at is not to blame."""
    if returncode < 0:
        return not_started(probe, f"it was killed by {_signal_name(-returncode)}")
    what = _last_line(stderr)
    evidence = f"the probe could not begin: {what or f'it left with {returncode}'}"
    if _UNREADABLE.match(what):
        cure = "files of Python, of the SDK or of its dependencies cannot be read: see the file system that they are on"
        return unseen(probe.name, probe.only, evidence, cure, status=Status.DEGRADED)
    return own_fault(probe.name, probe.only, evidence, what)


def _ending(probe: Probe, evidence: str, **more: Any) -> Finding:
    values = {"subject": probe.only, "status": Status.FAILED, "cure": probe.cure, "must": probe.must, **more}
    return Finding(probe=probe.name, check="answers", evidence=evidence, **values)


def _signal_name(number: int) -> str:
    return {each.value: each.name for each in signal.Signals}.get(number, f"signal {number}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_CURRENT = re.compile(r"^(Stack \(|Current thread 0x)", re.MULTILINE)
# A thread that waits for another, and frames that are not the probe's, say nothing about what hangs.
_WAITING = re.compile(r"/(threading|queue|selectors)\.py$")
_OURS = re.compile(r"/health/probe_main\.py$|^<")


def stuck_in(stderr: str) -> list[str]:
    """Return the innermost telling frame of each thread of a faulthandler dump: `file:line function`, each once.

    Of a crash it is the frame of the thread that crashed; threads that only wait for others say nothing.
    """
    places: dict[str, None] = {}
    for stack in stderr.split("\n\n"):  # of one thread
        frames = list(_FRAME.finditer(stack))
        if not frames or _WAITING.search(frames[0]["file"]):
            continue
        frame = next((frame for frame in frames if not _OURS.search(frame["file"])), None)
        if frame is not None:
            place = f"{frame['file'].rpartition('/')[2]}:{frame['line']} {frame['function']}"
            if _CURRENT.search(stack):
                return [place]
            places[place] = None
    return list(places)
