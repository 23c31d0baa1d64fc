"""A training without torch whose process does not end: `unended.py HOW [done]` holds the rank of the highest number."""

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

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


class SlowFile:
    """A file on a storage that takes 12 s for one."""

    def __init__(self, file):
        self.file = file

    def write(self, text):
        """Write, and take that long for the first piece."""
        if not self.file.tell():
            time.sleep(12)
        self.file.write(text)


def upload():
    """Save in a thread that outlives the script."""
    with (Path(os.environ["TOLD"]) / "saved.json").open("w") as file:
        json.dump([0, 1, 2], SlowFile(file))


if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
    if how == "thread":
        threading.Thread(target=prefetch, name="prefetch").start()
    elif how == "saves":
        threading.Thread(target=upload).start()
    elif how == "at-exit":
        atexit.register(prefetch)
    elif how == "child":
        child = subprocess.Popen(["sleep", "1000"])
        atexit.register(child.wait)
