"""Ranks that only beat, without torch and without one another: `beating.py END HANG`, two files.

They go on until END is there. Rank 1 hangs in attempt 0 once HANG is there: inner sections come and go for ever.
"""

import os
import sys
import time
from pathlib import Path

from resilience_sdk import heartbeat, straggler

end, hang = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
told, step = Path(os.environ["TOLD"]) / f"step-{attempt}-{rank}", 0
while not os.path.exists(end):
    with heartbeat(), straggler.section(f"section {step % 20}"):
        time.sleep(0.005)
        while (rank, attempt) == (1, 0) and os.path.exists(hang):
            with straggler.section("for ever"):
                time.sleep(0.01)
    step += 1
    told.with_name(f".{told.name}").write_text(str(step))
    told.with_name(f".{told.name}").replace(told)
sys.stdout.write(f"rank {rank} finished attempt {attempt}\n")  # in one write, as no `print` is under -u
