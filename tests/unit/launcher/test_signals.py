"""The launcher's inbox takes every signal that the settings allow."""

from __future__ import annotations

import os
import signal

import pytest

from resilience_sdk.launcher.signals import SignalInbox


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="the platform has no real-time signals")
def test_a_real_time_signal_without_a_name_is_a_request() -> None:
    """Python has no name for it; it is noted like any other, and is no person's."""
    number = signal.SIGRTMIN + 5
    with SignalInbox(["SIGTERM", f"SIGRTMAX{number - signal.SIGRTMAX}"]) as inbox:
        os.kill(os.getpid(), number)
        assert inbox.request == number
        assert not inbox.interrupted
