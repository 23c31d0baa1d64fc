"""Ranks that beat and print, without torch, until the file END is there: `printing_ranks.py END`."""

import os
import sys
import time
from pathlib import Path

from resilience_sdk import heartbeat

rank, attempt = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
told = Path(os.environ["TOLD"])


def tell(name: str, value: object) -> None:
    """Write a file that the test waits for."""
    (told / f".{name}").write_text(str(value))
    (told / f".{name}").replace(told / name)


tell(f"pid-{attempt}-{rank}", os.getpid())
step = 0
while not os.path.exists(sys.argv[1]):
    with heartbeat():
        time.sleep(0.01)
        print(f"attempt {attempt} rank {rank} step {step} {'.' * 80}")
    step += 1
    tell(f"step-{attempt}-{rank}", step)
print(f"rank {rank} has finished attempt {attempt}")
