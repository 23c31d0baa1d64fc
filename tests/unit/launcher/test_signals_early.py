from __future__ import annotations

import signal
import subprocess
import sys

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
