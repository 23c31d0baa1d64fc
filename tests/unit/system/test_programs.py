"""How a command of ours is ended."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from resilience_sdk.system import programs


@pytest.mark.parametrize(
    ("answer", "code", "has_session"),
    [("SIG_DFL", -signal.SIGTERM, True), ("SIG_IGN", -signal.SIGKILL, True), ("SIG_IGN", -signal.SIGKILL, False)],
)
def test_a_command_is_asked_first_and_killed_where_it_does_not_hear(answer: str, code: int, has_session: bool) -> None:
    """With and without a session of its own."""
    text = f"import signal; signal.signal(signal.SIGTERM, signal.{answer}); print(flush=True); signal.pause()"
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=has_session) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its handler is there
        programs.end(process, 0.5 if answer == "SIG_IGN" else 60.0)
        assert process.returncode == code
        programs.end(process, 0.0)  # of one that is gone: nothing
