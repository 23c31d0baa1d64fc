"""Ranks that beat; the last one then ends badly: `dying.py segfault` or `dying.py raise`. The others wait."""

import os
import signal
import sys
import time

from resilience_sdk import heartbeat

for _ in range(5):
    with heartbeat():
        time.sleep(0.02)
if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    if sys.argv[1] == "raise":
        raise ValueError("negative length in sample 17")
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(100)
