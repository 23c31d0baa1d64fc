"""Running probes beside each other, each in a process of its own that is never waited for beyond its deadline.

A process in D state (a dead mount, a driver that does not return) cannot be killed: it is left alone, collected
later if it ever ends, and told as a finding. Until then the same probe starts no other one: looks that come again and
again must not fill the process table with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import attrs

from resilience_sdk.health.child import DONE_LINE, FINDING
from resilience_sdk.health.endings import crashed, hung, still_stuck
from resilience_sdk.health.findings import Finding, Status, finding_from_json
from resilience_sdk.health.probes import Context, Probe

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from resilience_sdk.health.child import main; main()"
_OUTPUT_LIMIT = 1 << 20  # bytes of one probe; more is a probe gone wild
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
    looks = [_start(probe, context, limit_s) for probe in probes]
    with selectors.PollSelector() as selector:  # needs no descriptor of its own, of which there may be few
        for look in looks:
            look.register(selector)
        while selector.get_map():
            now = time.monotonic()
            for key, _ in selector.select(max(0.0, min(look.ends for look in looks if look.open) - now)):
                look, name = key.data
                if not look.read(name):
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            for look in looks:
                if look.open and (look.done or now >= look.ends):
                    look.timed_out = not look.done
                    look.unregister(selector)
    _end(looks)
    return [finding for look in looks for finding in look.findings()]


def kill_running(wait_s: float = 0.0) -> None:
    """Kill the probes that run now, for a process that ends before they do, and collect them. Any thread.

    Takes `wait_s` seconds where one of them cannot be killed.
    """
    until = time.monotonic() + wait_s
    running = list(_running)
    for process in running:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


@attrs.define(eq=False)
class _Look:
    """One probe's process, and what it wrote so far."""

    probe: Probe
    deadline_s: float
    started: float
    process: subprocess.Popen[bytes] | None
    error: str = ""
    stuck: _Look | None = None
    """An earlier look of the same probe whose process is still there; this one has none."""
    out: bytearray = attrs.field(factory=bytearray)
    err: bytearray = attrs.field(factory=bytearray)
    open: set[str] = attrs.field(factory=set)
    timed_out: bool = False
    state: str = ""

    @property
    def ends(self) -> float:
        return self.started + self.deadline_s

    def register(self, selector: selectors.BaseSelector) -> None:
        if self.process is None:
            return
        for name in ("out", "err"):
            stream = self.process.stdout if name == "out" else self.process.stderr
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, (self, name))
            self.open.add(name)

    def read(self, name: str) -> bool:
        """Take what is there; tell whether more may come."""
        assert self.process is not None
        stream = self.process.stdout if name == "out" else self.process.stderr
        assert stream is not None
        try:
            chunk = os.read(stream.fileno(), 65536)
        except BlockingIOError:
            return True
        kept: bytearray = getattr(self, name)
        kept += chunk[: max(0, _OUTPUT_LIMIT - len(kept))]
        if not chunk:
            self.open.discard(name)
        return bool(chunk)

    @property
    def done(self) -> bool:
        """Tell whether the probe said that it was done; its process may still hang in its exit."""
        return self.out.endswith(DONE_LINE)

    def unregister(self, selector: selectors.BaseSelector) -> None:
        assert self.process is not None
        for name in self.open:
            stream = self.process.stdout if name == "out" else self.process.stderr
            assert stream is not None
            selector.unregister(stream)
        self.open.clear()

    def findings(self) -> list[Finding]:
        """Return what the probe told, and how it ended where it did not end well."""
        if self.stuck is not None and self.stuck.process is not None:
            pid, ago_s = self.stuck.process.pid, self.started - self.stuck.started
            return [still_stuck(self.probe, pid, ago_s, _kernel_state(pid))]
        if self.process is None:
            return [_not_started(self.probe, self.error)]
        told = _told(bytes(self.out))
        if self.done:
            return told
        stderr = self.err.decode(errors="replace")
        if self.timed_out:
            return [*told, hung(self.probe, self.deadline_s, stderr, self.state)]
        return [*told, crashed(self.probe, self.process.returncode, stderr)]


def _start(probe: Probe, context: Context, limit_s: float | None) -> _Look:
    deadline_s = probe.deadline_s if limit_s is None else min(probe.deadline_s, limit_s)
    started = time.monotonic()
    if (stuck := _stuck(probe)) is not None:
        return _Look(probe=probe, deadline_s=deadline_s, started=started, process=None, stuck=stuck)
    task = {
        "name": probe.name,
        "function": probe.function,
        "ends": started + deadline_s,
        "context": attrs.evolve(context, only=probe.only or context.only).to_json(),
    }
    # -I and -S: nothing of the user's environment or site runs in it, which also halves the time of its start.
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *_import_path()]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return _Look(probe=probe, deadline_s=deadline_s, started=started, process=None, error=str(error))
    _running.add(process)
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it died at once, which its end will tell
        process.stdin.write(json.dumps(task).encode())
        process.stdin.close()
    return _Look(probe=probe, deadline_s=deadline_s, started=started, process=process)


def _import_path() -> list[str]:
    """Return where this process imports from, for one that starts elsewhere."""
    here = ""
    with contextlib.suppress(OSError):  # the working directory may be gone, or its mount dead
        here = os.getcwd()
    return [path or here for path in sys.path if path or here]


def _end(looks: list[_Look]) -> None:
    """Kill what still runs, and give what was killed a moment to go."""
    running = [look for look in looks if look.process is not None]
    for look in running:
        assert look.process is not None
        if look.process.poll() is not None:
            look.timed_out = False  # it is gone, and something that it started held its output open
        elif look.timed_out:
            look.state = _kernel_state(look.process.pid)
            with contextlib.suppress(OSError):
                os.killpg(look.process.pid, signal.SIGKILL)  # with what it started itself
    until = time.monotonic() + _KILL_GRACE_S
    for look in running:
        assert look.process is not None
        try:
            look.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            _left.append(look)
        _running.discard(look.process)
        for stream in (look.process.stdout, look.process.stderr):
            assert stream is not None
            stream.close()


def collect_left() -> bool:
    """Collect the processes that were killed and have gone since; tell whether others have not. One thread."""
    _left[:] = [look for look in _left if look.process is not None and look.process.poll() is None]
    return bool(_left)


def _stuck(probe: Probe) -> _Look | None:
    """Return the look of the same probe, at the same thing, whose process cannot be killed."""
    for look in _left:
        if (look.probe.function, look.probe.only) == (probe.function, probe.only) and look.process is not None:
            try:
                look.process.wait(_KILL_GRACE_S)  # on a busy machine it may only have been slow to go
            except subprocess.TimeoutExpired:
                return look
    return None


def _kernel_state(pid: int) -> str:
    """Return in which state, and where in the kernel, a process is; empty where /proc does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        with open(f"/proc/{pid}/wchan") as file:
            where = file.read().strip()
    except (OSError, IndexError):
        return ""
    return f"{state} state" + (f" in {where}" if where not in ("", "0") else "")


def _told(out: bytes) -> list[Finding]:
    """Return the findings among the lines of a probe."""
    findings = []
    for line in out.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # the last line may be cut off by a kill or by the limit
            message = json.loads(line)
            if isinstance(message, dict) and FINDING in message:
                findings.append(finding_from_json(message[FINDING]))
    return findings


def _not_started(probe: Probe, error: str) -> Finding:
    return Finding(
        probe=probe.name,
        check="probe",
        subject=probe.only,
        status=Status.UNAVAILABLE,
        evidence=f"its process could not be started: {error}",
        cure="it needs processes, memory and file descriptors (`ulimit -u`, `free -m`, `ulimit -n`)",
    )
