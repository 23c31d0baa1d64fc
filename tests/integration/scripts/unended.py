"""A training without torch whose process does not end: `unended.py HOW [done]` holds the rank of the highest number."""

import atexit
import os
import subprocess
import sys
import threading

from resilience_sdk import heartbeat

how = sys.argv[1]
for _ in range(3):
    with heartbeat():
        pass
if "done" in sys.argv:
    heartbeat.done()


def prefetch():
    """Wait for what never comes."""
    threading.Event().wait()


if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
    if how == "thread":
        threading.Thread(target=prefetch, name="prefetch").start()
    elif how == "at-exit":
        atexit.register(prefetch)
    elif how == "child":
        child = subprocess.Popen(["sleep", "1000"])
        atexit.register(child.wait)
