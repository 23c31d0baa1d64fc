"""The end of a launcher's process, some of whose threads may be inside a call of torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import NoReturn


def leave(exit_code: int) -> NoReturn:
    """End the process with that code, after its `atexit` functions, without taking the interpreter down.

    A daemon thread that comes back from a call of torch's store while the interpreter goes down is ended by
    unwinding its C++ frames, which aborts the process: a job that finished would end by SIGABRT. The threads that
    ask the rendezvous cannot be joined for certain, some of them are torch's own.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)
