"""Programs that are given a task and tell an answer.

Standard output is no such way: libraries print on it (`NCCL_DEBUG=INFO`), and what the program has forked holds it
open, perhaps in a driver that even SIGKILL does not reach. So the answer has a pipe of its own, and is one line: it is
there once the line has ended, whoever still holds the pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.system import programs
from resilience_sdk.system.programs import Program

_LOOK_S = 0.1  # how soon it is seen that a program ended without a word
_COLLECT_S = 1.0  # for one that was killed


def answer_of(program: Program, task: Mapping[str, Any], inbox: SignalInbox | None, longest_s: float) -> Any:
    """Return what a program answers; it finds the task on its standard input, and in it `answer`, a descriptor.

    It is ended, and what it has started with it, once it has answered, or when a signal asks to leave, which waits
    where there is no `inbox`. Main thread.

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
        with contextlib.nullcontext() if inbox is None else inbox.raising():
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
