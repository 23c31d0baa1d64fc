"""Programs that ask whether to leave, each run as a rank in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent.parent.parent
NO_PLACE = {"RESILIENCE_PAGE_DIR": "/dev/null/nowhere"}
LOOP = """
import os, signal, time
from resilience_sdk import preemption
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
assert not preemption.check()
assert preemption.time_left() is None
{ask}
end = time.monotonic() + 30
while not preemption.check():
    time.sleep(0.001)
    assert time.monotonic() < end
print(heard, 50 < preemption.time_left() <= 60)
preemption.exit()
"""


def run(folder, program, **env):
    """Run a program and return what it printed and how it ended."""
    pages = folder / "pages"
    pages.mkdir(mode=0o700)
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT), "RESILIENCE_PAGE_DIR": str(pages)}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=own | {"RESILIENCE_RUN_DIR": str(folder / "run")} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
