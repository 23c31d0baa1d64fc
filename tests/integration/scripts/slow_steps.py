"""A loop whose steps are slow for one reason, or for none: `slow_steps.py [--fault WHY] [--seconds S]`.

Sleeps stand for work, so that a step takes on any machine what is planted: some 45 ms with `none`. `loader`: each batch
takes long; `save`: so does a save, every fifth step; `rank`: the last rank computes longer; `batch`: of a step little
grows with its work, which varies.
"""

import argparse
import itertools
import os
import time

import torch
import torch.distributed as dist

from resilience_sdk import heartbeat, straggler

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="none", choices=["none", "loader", "save", "rank", "batch"])
parser.add_argument("--seconds", type=float, default=10.0)
args = parser.parse_args()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def batches():
    """Yield sizes of batches, small and large in turn, the same ones on all ranks."""
    for number in itertools.count():
        time.sleep(0.06 if args.fault == "loader" else 0.001)
        yield 180 if number % 2 else 20


torch.set_num_threads(1)
dist.init_process_group("gloo")
end = time.monotonic() + args.seconds
for step, size in enumerate(straggler.iterate(batches())):
    with heartbeat():
        straggler.work(size)
        fixed_s, grows_s = (0.09, 0.00025) if args.fault == "batch" else (0.004, 0.00025)
        with straggler.section("fwd"):
            time.sleep(fixed_s + grows_s * size)
            if args.fault == "rank" and rank == ranks - 1:
                time.sleep(0.06)
        with straggler.section("bwd"):
            time.sleep(0.01)
        # All leave at one step.
        leave = torch.tensor([float(time.monotonic() > end)])
        with straggler.section("grads", kind="comm"):
            dist.all_reduce(leave)
        with straggler.section("optim"):
            time.sleep(0.003)
        if args.fault == "save" and step % 5 == 0:
            with straggler.section("checkpoint", kind="io"):
                time.sleep(0.1)
    if leave.item():
        break
dist.destroy_process_group()
