import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import time

import generic


def writer(case, job):
    case.wait_event("wait", 150)
    time.sleep(75)
    with open(case.dir / "shards.fifo", "wb") as fifo:
        fifo.write(b"data")


generic.healthy(__file__, 75, [0], outside=writer)
