"""Runs parts of a test program in forked processes, so that torch is imported once for all of them."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence


def load_once(*packages: str) -> None:
    """Import all modules of these packages of ours now: what loads them when it needs them would do so in each fork."""
    for name in packages:
        found = importlib.import_module(name)
        for module in pkgutil.walk_packages(found.__path__, f"{name}."):
            importlib.import_module(module.name)


def start(work: Callable[[], object], output: int | None = None) -> int:
    """Fork a process that does this and ends, with 1 and a traceback where it raises; return its pid.

    `output`: a descriptor that becomes its standard output.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if output is not None:
                os.dup2(output, 1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def wait(pids: Sequence[int]) -> list[int]:
    """Wait for these processes; return their exit codes, negative for a signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def run(work: Callable[[], object]) -> tuple[int, str]:
    """Do this in a forked process; return its exit code and what it printed."""
    read_end, write_end = os.pipe()
    pid = start(work, write_end)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    return wait([pid])[0], said
