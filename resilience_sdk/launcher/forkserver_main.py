"""The fork server: one thread, torch preloaded, no CUDA. Runs in its own process, `programs.FORK_SERVER`.

On an order it forks; the child leaves the server's loop, becomes the worker and ends like any interpreter.
Python's own forkserver was not used: its children hold seven descriptors and a start method that a script
can see, end by `os._exit`, have no stdin, and stay until all ranks are done.

No rank outlives the launcher. The server notices the launcher's end by the closed channel or by the
kernel's parent-death signal, and kills the process groups of all ranks, so DataLoader workers go as well.
Should the server itself be killed, the kernel kills each rank, and the launcher their groups.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from resilience_sdk.launcher import worker
from resilience_sdk.launcher.forkserver_wire import Order, Readiness, WireEnd
from resilience_sdk.system.gloo_teardown import let_threads_finish, settle_at_exit
from resilience_sdk.system.linux import aside, die_with_parent, opened, thread_count

# torch._dynamo, torch.optim and torch.nn.parallel: DDP and optimizers import them on first use, 1.5 s in
# every attempt. Session, structlog and what resumes a
# checkpoint are for what we do and say in a rank: their import must not cost each rank anew.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.optim",
    "torch.nn.parallel",
    "torch.distributed",
    "torch.utils.data",
    "numpy",
    "structlog",
    "resilience_sdk.rank",
    "resilience_sdk.rank.run",
    "resilience_sdk.checkpoint.capture",
    "resilience_sdk.checkpoint.proof",
    "torch.utils.serialization",
)
# Python ignores these from its start on and exec would keep that; subprocess resets them for the same reason.
_RESET_BY_SUBPROCESS = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")


def serve(words: Sequence[str]) -> None:
    """Serve as the command line tells: descriptor of the channel, pid of the launcher, mode, mask; the rest is shown.

    What `ps` is to show of a worker stands behind them, so that there is room for it.
    """
    mask = {int(number) for number in words[3].split(",") if number}
    main(channel_fd=int(words[0]), launcher_pid=int(words[1]), mode=words[2], mask=mask)


def main(*, channel_fd: int, launcher_pid: int, mode: str, mask: set[int]) -> None:
    """Serve until the launcher ends; in a forked worker, return when its script does.

    `mode` is `fork` (preload, workers by fork) or `exec` (no preload, workers by exec). The launcher has
    blocked the signals of this process; `mask` holds those that a worker is to have blocked.
    """
    # Until there are ranks, dying at once is right; from then on the loop has groups to end first.
    die_with_parent(signal.SIGKILL)
    if os.getppid() != launcher_pid:
        raise SystemExit(1)
    os.set_inheritable(channel_fd, False)
    channel = WireEnd(socket.socket(fileno=channel_fd))
    readiness = _preload() if mode == "fork" else Readiness(None, (), 0.0)
    channel.send(
        {
            "op": "ready",
            "problem": readiness.problem,
            "missing": readiness.missing,
            "seconds": readiness.seconds,
        }
    )
    order = _Server(channel, launcher_pid, mask).serve()
    # From here on this is a worker. Nothing may catch what the script raises: the interpreter handles it.
    worker.freshen()
    let_threads_finish()
    atexit.register(settle_at_exit)
    worker.run_script(order.script)


def _preload() -> Readiness:
    """Import what workers need, and find out whether forking from here is safe."""
    began = time.monotonic()
    missing = import_all(PRELOAD)
    # What lives now is never collected: the first full collection of a rank would copy all of its pages.
    gc.collect()
    gc.freeze()
    return Readiness(_problem(), missing, time.monotonic() - began)


def import_all(names: Iterable[str]) -> tuple[str, ...]:
    """Import what is installed of these modules; return `module: reason` of those that are and cannot be imported."""
    failed = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a worker that needs it will say so itself
            if not (isinstance(error, ModuleNotFoundError) and error.name == name):
                failed.append(f"{name}: {type(error).__name__}: {error}")
    return tuple(failed)


def _problem() -> str | None:
    """Say why a fork of this process would not be a sound worker, or None.

    The fork that is tried comes before the count: OpenBLAS ends its threads when a process forks, and
    starts them anew where they are needed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of those same threads
        pid = os.fork()
    if pid == 0:
        torch: Any = sys.modules.get("torch")
        os._exit(1 if torch is not None and torch.cuda._is_in_bad_fork() else 0)
    _, status = os.waitpid(pid, 0)
    if status:
        return "a preloaded module touched CUDA, which forked ranks could not use"
    if devices := opened("/dev/nvidia"):
        return f"a preloaded module opened {devices[0]}"
    threads = thread_count()
    if threads is not None and threads != 1:
        return f"a preloaded module started threads: {threads} run, forking is safe with 1"
    return None


class _Server:
    """The loop: orders in, process ids and exit codes out."""

    def __init__(self, channel: WireEnd, launcher_pid: int, mask: set[int]) -> None:
        self._channel = channel
        self._launcher_pid = launcher_pid
        self._mask = mask  # the signal mask that a worker is to have
        self._pid = os.getpid()
        self._ranks: dict[int, int] = {}  # pid of each live worker -> number of its order
        self._selector = selectors.DefaultSelector()
        self._wakeup_read, self._wakeup_write = os.pipe()

    def serve(self) -> Order:
        """Serve until the launcher is gone. Returns in a forked worker only, its order."""
        self._listen()
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wakeup_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup_read, 4096)
            self._reap()
            if os.getppid() != self._launcher_pid:
                self._end_all()
            for message in self._channel.receive():
                order = Order.from_message(message)
                if self._start(order):
                    return order
            if not self._channel.open:
                self._end_all()

    def _listen(self) -> None:
        for fd in (self._wakeup_read, self._wakeup_write):
            os.set_blocking(fd, False)
        self._old_handler = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._selector.register(self._wakeup_read, selectors.EVENT_READ)
        self._selector.register(self._channel, selectors.EVENT_READ)
        # The signal that already wakes the loop; the launcher's death is then seen by getppid. The channel
        # alone would not do: a fork of the launcher that never executes anything keeps the other end open.
        die_with_parent(signal.SIGCHLD)
        if os.getppid() != self._launcher_pid:
            os._exit(1)

    def _start(self, order: Order) -> bool:
        """Fork the worker of `order`; True in the child that is to become it."""
        pid = os.fork()
        if pid == 0:
            self._leave(order)
            if order.command is not None:
                _execute(order)
            return True
        self._ranks[pid] = order.number
        self._channel.send({"op": "started", "number": order.number, "pid": pid})
        return False

    def _leave(self, order: Order) -> None:
        """In the child: let go of all that is the server's, and take what torchrun gives its workers."""
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGCHLD, self._old_handler)
        self._selector.close()
        self._channel.close()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)
        worker.screens.update(
            {
                fd: screen
                for path, fd in ((order.stdout, 1), (order.stderr, 2))
                if path and (screen := _redirect(path, fd))
            }
        )
        try:
            os.chdir(order.directory)
        except OSError as error:
            _give_up(f"this worker cannot start: {error}")
        worker.replace_environment(order.environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._ranks.pop(pid, None)
            if number is not None:
                code = os.waitstatus_to_exitcode(status)
                self._channel.send({"op": "exited", "number": number, "pid": pid, "code": code})

    def _end_all(self) -> NoReturn:
        """Kill every rank with all that it started, and end: the launcher is gone, nobody else would."""
        for pid in self._ranks:
            for kill in (os.killpg, os.kill):  # the second for a worker that has not made its group yet
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
        os._exit(0)


def _redirect(path: str, fd: int) -> int | None:
    """Let a stream go into a file; return where it went before."""
    screen = None
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as error:  # a full disk costs the log, not the rank: it goes on with the launcher's stream
        os.write(2, f"resilience: cannot write {path}: {error.strerror}; it goes to the screen\n".encode())
        return None
    with contextlib.suppress(OSError):
        screen = aside(os.dup(fd))
    os.dup2(file, fd)
    os.close(file)
    return screen


def _execute(order: Order) -> NoReturn:
    assert order.command is not None
    for name in _RESET_BY_SUBPROCESS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        env = {**order.environment, **worker.handed_on_screens(order.command)}
        os.execvpe(order.command[0], order.command, env)  # noqa: S606 - as torchrun
    except OSError as error:
        _give_up(f"cannot execute {order.command[0]!r}: {error.strerror}")


def _give_up(message: str) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"resilience: {message}\n".encode(errors="replace"))
    os._exit(127)
