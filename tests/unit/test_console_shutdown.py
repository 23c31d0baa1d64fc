"""A line from a helper thread must not hurt the end of the process."""

from __future__ import annotations

import subprocess
import sys

TALKING = """
import threading
from resilience_sdk import console

def talk():
    while True:
        console.say("still here " * 50)

for _ in range(3):
    threading.Thread(target=talk, daemon=True).start()
"""


def test_a_daemon_thread_may_speak_while_the_interpreter_shuts_down():
    """Python aborts where a daemon thread holds the lock of a standard stream at the end; ours never takes it."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", TALKING],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0
