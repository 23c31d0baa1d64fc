"""One process that saves by a `Checkpointer` of its own, and dies in step 2 unless it was resumed from before that.

bare_saving.py RUN_DIR
"""

import os
import sys
from pathlib import Path

import torch

from resilience_sdk import heartbeat
from resilience_sdk.checkpoint import Checkpointer

weight = torch.zeros(3)
checkpointer = Checkpointer({"weight": weight}, run_dir=sys.argv[1], every=1)
first = checkpointer.resume()
with (Path(os.environ["TOLD"]) / "resumed").open("a") as told:
    told.write(f"{first} {int(weight[0])}\n")
for step in range(first, 4):
    with heartbeat():
        weight += 1
    if step == 2 and first != 1:
        os._exit(3)
    checkpointer.maybe_save(step + 1)
