"""Steps whose length varies fourfold, the same on all ranks, and tells it: `varying_lengths.py --slower-from STEP`.

From that step on all ranks are slower by half. It goes on until a file `enough` is in TOLD.
"""

import argparse
import os
import random
import time
from pathlib import Path

from resilience_sdk import heartbeat, straggler

parser = argparse.ArgumentParser()
parser.add_argument("--slower-from", type=int, default=160)
args = parser.parse_args()

told = Path(os.environ["TOLD"])
chance = random.Random(7)  # the same on all ranks: a batch sampler that all have in common
step = 0
while not (told / "enough").exists():
    length = chance.uniform(100.0, 400.0)
    slower = 1.5 if step >= args.slower_from else 1.0
    with heartbeat():
        straggler.work(length)
        with straggler.section("fwd"):
            time.sleep(2.4e-4 * length * slower)
    step += 1
