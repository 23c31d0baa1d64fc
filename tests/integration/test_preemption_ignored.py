"""A signal to leave that no check answers: it acts in the end, as it would have without us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SCRIPT = """
import sys, time
from resilience_sdk import preemption
preemption.check()
print("ready", flush=True)
while True:
    time.sleep(0.05)  # a long evaluation, an upload
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a monitor's page")
def test_a_signal_acts_when_no_check_answers_it_within_the_grace(tmp_path: Path) -> None:
    """Not before the grace is over, not never, and it is said why."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENCE_", "SLURM_"))}
    env |= {"PYTHONPATH": str(PROJECT), "RESILIENCE_RUN_DIR": str(tmp_path / "run"), "RESILIENCE_PREEMPT_TIME": "3"}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - began > 3
    assert "no stop was agreed within 3 s" in told
