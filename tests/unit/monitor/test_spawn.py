"""Starting a monitor from a script that does as it likes with its children and with signals."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from resilience_sdk.monitor import spawn
from resilience_sdk.system.procfs import status_fields


def test_a_monitor_has_nothing_of_the_signals_of_the_script(tmp_path: Path) -> None:
    """Though some are ignored and some blocked: SIGCHLD too, with which nobody learns how the start ended."""
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGALRM})
    try:
        assert spawn.ensure_monitor(tmp_path)
        state = spawn.read_state(tmp_path)
        fields = status_fields(state["pid"])
    finally:
        signal.signal(signal.SIGCHLD, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        with contextlib.suppress(OSError, KeyError):  # without a job it goes by itself
            os.kill(state["pid"], signal.SIGKILL)
    assert int(fields["SigBlk"], 16) == 0
    assert not int(fields["SigIgn"], 16) >> (signal.SIGCHLD - 1) & 1
