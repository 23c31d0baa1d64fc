"""The end of a process whose threads are inside a call of torch."""

import subprocess
import sys

SCRIPT = """
import atexit, sys, threading
from datetime import timedelta
from torch.distributed import TCPStore
from resilience_sdk.launcher.signals import leave

store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
own = store.clone()
asks = threading.Event()

def ask():
    while True:
        asks.set()
        own.check(["key"])

for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
atexit.register(print, "at exit")
asks.wait()
print("last words")
leave(int(sys.argv[1]))
"""


def test_threads_inside_the_store_do_not_abort_the_process():
    """The exit code is the one that was asked for, what was printed is there, and atexit functions have run."""
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run([*command, "75"], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (75, "last words\nat exit\n"), ended.stderr
