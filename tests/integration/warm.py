"""Launchers that are forked from one warm process, so that torch is imported once for many jobs.

It is what the launcher's fork server does for ranks, one floor higher: a process that has imported everything forks the
launcher of a job, which forks, before it does anything else, what waits to become its fork server. Command line,
environment, session and descriptors are those of a fresh launcher. The code that runs is the product's, with one
exchange: where the launcher starts its first fork server by exec, the one that waits is told to become it.

What is read when a process starts cannot be given to a fork: `why_not` tells, and such a job needs a fresh launcher.

Jobs of a framework may have that imported, too, each framework by a warm process of its own: `FRAMEWORKS`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent.parent
MARK = "FAULT_TEST_MARK"  # in the environment that /proc shows, by which a job's processes are found
_NO_MARK = "0" * 32
FRAMEWORKS = {
    "accelerate": ("accelerate",),
    "torch": ("torchdata.stateful_dataloader", "torch._dynamo"),
    "lightning": ("lightning.pytorch", "torchdata.stateful_dataloader"),
    "transformers": ("transformers.trainer", "transformers.training_args"),
}
"""Those whose import does not depend on what a script does before it, with what takes the time of it."""
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
_ROOM = "x" * 8000  # of the command line that /proc shows
_REQUEST_BYTES = 200_000


class WarmProcess:
    """A forked launcher, as `subprocess.Popen` shows one."""

    def __init__(self, args: Sequence[str], told: int) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._told = os.fdopen(told, "rb", buffering=0)
        self._lock = threading.Lock()
        self._text = b""
        while not self._text.count(b"\n"):
            if not self._read(None):
                raise RuntimeError("the warm process ended")
        self.pid = int(self._text.split(b"\n")[0])

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, None while it runs."""
        with self._lock:
            if self.returncode is None:
                self._read(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with selectors.DefaultSelector() as selector:
                selector.register(self._told, selectors.EVENT_READ)
                selector.select(left)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        self.send_signal(signal.SIGTERM)

    def _read(self, wait_s: float | None) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._told, selectors.EVENT_READ)
            if not selector.select(wait_s):
                return False
        piece = self._told.read(100)
        if not piece:
            self.returncode = -signal.SIGKILL  # the warm process was killed, and all that it had forked with it
        self._text += piece or b""
        if self._text.count(b"\n") == 2:
            self.returncode = int(self._text.split(b"\n")[1])
        if self.returncode is not None:
            self._told.close()
        return bool(piece)


class _Warm:
    """This side of the warm process; one for each process that runs tests, and each framework that its jobs use."""

    def __init__(self, framework: str | None = None) -> None:
        self._imports = FRAMEWORKS.get(framework or "", ())
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self, args: Sequence[str], env: Mapping[str, str], cwd: Path, stdio: Sequence[int]) -> WarmProcess:
        """Fork `resilience run` with these arguments."""
        read_end, write_end = os.pipe()
        request = json.dumps({"args": list(args), "env": dict(env), "cwd": str(cwd)}).encode()
        with self._lock:
            socket.send_fds(self._warmed(), [request], [*stdio, write_end])
        os.close(write_end)
        return WarmProcess([sys.executable, "-m", "resilience_sdk.launcher", *args], read_end)

    def _warmed(self) -> socket.socket:
        if self._channel is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
            # It leaves this process at once: tests may look at what children they have.
            subprocess.run(
                [sys.executable, "-u", __file__, ",".join((str(theirs.fileno()), *self._imports)), _ROOM],
                env=_environment() | {MARK: _NO_MARK},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                check=True,
            )
            theirs.close()
            self._channel = ours
            atexit.register(ours.close)  # which ends the process, and leaves no socket unclosed in this one
        return self._channel


def _environment() -> dict[str, str]:
    """Return what is set while everything is imported: what ranks read then, the launcher sets so for two of them."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | {
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "1",
    }


_warm_with = cache(_Warm)


def start(
    args: Sequence[str], env: Mapping[str, str], cwd: Path, stdio: Sequence[int], framework: str | None = None
) -> WarmProcess:
    """Start `resilience run` with these arguments, and these descriptors as its standard streams.

    `framework`: the one of `FRAMEWORKS` that its ranks need not import.
    """
    return _warm_with(framework if framework in FRAMEWORKS else None).start(args, env, cwd, stdio)


def why_not(args: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Say why a job needs a fresh launcher, or return None."""
    from resilience_sdk.launcher.forkserver import load_time_part

    if load_time_part({"OMP_NUM_THREADS": "1", **env}) != load_time_part(_environment()):
        return "variables that are read when a process starts"
    return None


# -- in the warm process


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a launcher for each request. Return the request in the launcher, None when nobody asks any more."""
    running: dict[int, tuple[int, int]] = {}  # pidfd -> pid of a launcher, and where its end is told
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                pid, told = running.pop(key.fd)
                _, status = os.waitpid(pid, 0)
                os.write(told, b"%d\n" % os.waitstatus_to_exitcode(status))
                selector.unregister(key.fd)
                os.close(told)
                os.close(key.fd)
                continue
            data, fds, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 4)
            if not data:
                return None
            pid = os.fork()
            if pid == 0:
                selector.close()
                channel.close()
                for number, fd in enumerate(fds[:3]):
                    os.dup2(fd, number)
                os.closerange(3, 1024)
                request: dict[str, Any] = json.loads(data)
                return request
            os.write(fds[3], b"%d\n" % pid)
            for fd in fds[:3]:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = (pid, fds[3])
            selector.register(pidfd, selectors.EVENT_READ)


def _become(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Look like a process that was exec'd with this command and environment."""
    from resilience_sdk.launcher import worker
    from resilience_sdk.system import linux
    from resilience_sdk.system.hostinfo import stat_fields

    worker.replace_environment(env)
    sys.orig_argv = list(command)
    shown = Path("/proc/self/environ")
    begin = int(stat_fields(os.getpid())[50 - 3])  # field 50 of proc(5): where the environment is
    at = shown.read_bytes().index(f"{MARK}=".encode()) + len(MARK) + 1
    ctypes.memmove(begin + at, env[MARK].encode(), len(_NO_MARK))
    # Else nobody would find these processes, or know them.
    assert env[MARK].encode() in shown.read_bytes()
    assert linux.show_command_line(command)


class _ForkedServer:
    """What `subprocess.Popen` would return for the fork server."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["the fork server"], timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _launch(request: dict[str, Any]) -> None:
    """Be the launcher; or, in the process that waits to become its fork server, that."""
    from resilience_sdk.launcher import forkserver, worker
    from resilience_sdk.system import programs

    os.setsid()
    os.chdir(request["cwd"])
    _become([sys.executable, "-m", "resilience_sdk.launcher", *request["args"]], request["env"])
    worker.freshen()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    # From its first moment on it must not hear of signals to the whole job, as one that is exec'd.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - forkserver._NEVER_BLOCKED)
    server = os.fork()
    if server == 0:
        ours.close()
        _wait_to_serve(theirs, launcher)
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()
    waiting = [ours]

    start = programs.start

    def start_warm(program: programs.Program, *words: str, **options: Any) -> Any:
        if program != programs.FORK_SERVER or not waiting:
            return start(program, *words, **options)
        wanted = dict(options["env"])
        same = forkserver.load_time_part(wanted) == forkserver.load_time_part(_environment())
        with waiting.pop() as channel:
            if same and words[2] == "fork" and "PYTHON_EXEC" not in wanted:
                task = json.dumps({"words": words, "env": wanted}).encode()
                socket.send_fds(channel, [task], options["pass_fds"])
                return _ForkedServer(server)
        _ForkedServer(server).wait(10.0)  # it is not wanted
        return start(program, *words, **options)

    programs.start = start_warm
    import runpy

    sys.path.insert(0, os.getcwd())
    sys.argv = ["-m", *request["args"]]
    runpy.run_module("resilience_sdk.launcher", run_name="__main__", alter_sys=True)


def _wait_to_serve(channel: socket.socket, launcher: int) -> None:
    from resilience_sdk.launcher import forkserver_main
    from resilience_sdk.system import programs
    from resilience_sdk.system.linux import die_with_parent

    die_with_parent(signal.SIGKILL)
    os.setsid()
    data, fds, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 1)
    channel.close()
    if not data:
        os._exit(0)
    order = json.loads(data)
    words = order["words"]
    _become(programs.command(programs.FORK_SERVER, *words), order["env"])
    forkserver_main.main(
        channel_fd=fds[0],
        launcher_pid=launcher,
        mode=words[2],
        mask={int(number) for number in words[3].split(",") if number},
    )


def _load(imports: Sequence[str]) -> None:
    """Import what the launcher and its fork server would, and this."""
    import gc
    import importlib
    import pkgutil

    from resilience_sdk.launcher import forkserver_main

    forkserver_main.import_all(forkserver_main.PRELOAD)
    for package in ("resilience_sdk.launcher", "resilience_sdk.monitor"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    # Put there for this file, and in no fresh process.
    del sys.path[0]
    asked_on, *imports = sys.argv[1].split(",")
    _load(imports)
    asked = _serve(socket.socket(fileno=int(asked_on)))
    if asked is not None:
        _launch(asked)
