from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from resilience_sdk.core.early_signals import leaving_at_once

LOADING = """
from resilience_sdk.core.early_signals import leaving_at_once
with leaving_at_once("SIGTERM"):
    try:
        print("loads", flush=True)
        input()
    except BaseException:  # as modules do that try what they may import
        pass
"""


def test_a_request_while_the_launcher_loads_is_no_failure():
    """It ends at once with the code that a scheduler requeues, and says why."""
    with subprocess.Popen(
        [sys.executable, "-c", LOADING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"loads\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75
        assert b"asked to leave by SIGTERM before the job began" in process.stderr.read()


OVER = """
import os
class Late:  # goes with its module, when the interpreter has given up its handlers
    def __del__(self, write=os.write, read=os.read):
        write(1, b"late\\n")
        read(0, 1)
late = Late()
from resilience_sdk.core.early_signals import job_has_begun, job_is_over, leaving_at_once
with leaving_at_once():
    job_has_begun()
    code = job_is_over({code})
print("over", flush=True)
if {waits}:
    input()
"""


@pytest.mark.parametrize(
    ("code", "number", "waits"),
    [(0, signal.SIGTERM, True), (1, signal.SIGINT, True), (77, signal.SIGHUP, True), (0, signal.SIGTERM, False)],
)
def test_a_request_after_the_last_word_changes_no_exit_code(code, number, waits):
    """Whoever was told that the job has finished is not told of a failure then; and it ends at once."""
    with subprocess.Popen(
        [sys.executable, "-c", OVER.format(code=code, waits=waits)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"over\n"
        if not waits:
            assert process.stdout.readline() == b"late\n"
        process.send_signal(number)
        process.stdin.close()
        assert process.wait(30) == code
        assert process.stderr.read() == b""


def test_a_handler_of_somebody_else_stays():
    """Nothing is changed where the signal was handled or ignored before, and nothing stays behind."""
    for handler in (signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None):
        before = signal.signal(signal.SIGTERM, handler)
        try:
            with leaving_at_once("SIGTERM"):
                assert (signal.getsignal(signal.SIGTERM) is handler) == (handler is not signal.SIG_DFL)
            assert signal.getsignal(signal.SIGTERM) is handler
        finally:
            signal.signal(signal.SIGTERM, before)
