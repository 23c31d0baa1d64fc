"""The standard streams of a command: there from its first line, and no trouble where nobody reads them."""

from __future__ import annotations

import contextlib
import os
import select
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Point those standard streams to /dev/null that the caller closed (`>&-`).

    Else the next file of ours gets the number, in the ranks too: what a C library prints would end up in a journal.
    """
    for number in range(len(_STREAMS)):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free: those below it are taken by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - to the end


def nobody_reads() -> bool:
    """Tell whether the reader of standard output or error has left."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def drop_unwritten() -> None:
    """Write what is left in standard output and error, and drop what cannot be written.

    Python would write it at exit, complain, and leave with 120 in place of the command's own exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
