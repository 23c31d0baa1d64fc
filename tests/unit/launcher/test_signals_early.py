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
from resilience_sdk.core.early_signals import job_has_begun, job_is_over, leaving_at_once
with leaving_at_once():
    job_has_begun()
    code = job_is_over({code})
print("over", flush=True)
input()  # as long as the interpreter takes to go down
"""


@pytest.mark.parametrize(("code", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT), (77, signal.SIGHUP)])
def test_a_request_after_the_last_word_changes_no_exit_code(code, number):
    """Whoever was told that the job has finished is not told of a failure then; and it ends at once."""
    with subprocess.Popen(
        [sys.executable, "-c", OVER.format(code=code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"over\n"
        process.send_signal(number)
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
