"""c08 sdk_save_one_rank: TERM to rank 1 alone while the SDK writes 200 MB; the script had its own handler before. See expected.md."""

import os
import signal
import time

from kit import Wrong, play

TRAIN = '''
import signal
import work
work.log("up")
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import resilience_sdk
signal.signal(signal.SIGTERM, lambda number, frame: work.log("own_handler"))
dist.init_process_group("gloo")
model, optimizer = work.make()
ddp = DistributedDataParallel(model)
ballast = nn.Module()
ballast.register_buffer("table", torch.arange(50_000_000, dtype=torch.float32))
loader = work.loader(work.TOTAL)
state = {"model": ddp, "optimizer": optimizer, "ballast": ballast, "data": loader}
with resilience_sdk.start_run(state=state, checkpoint_every=10) as run:
    for step, batch in run.steps(loader):
        work.train(ddp, optimizer, step, int(batch[0]))
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("step", step=0)
    rank = case.rank_pids()
    if 1 not in rank:
        raise Wrong("rank 1 to live", str(rank))
    place = case.run_dir / "checkpoints"
    end = time.monotonic() + 90
    while time.monotonic() < end:
        try:
            names = [one.name for one in os.scandir(place) if one.is_dir() and os.listdir(one.path)]
        except OSError:
            names = []
        if names and not case.checkpoints():
            break
        if case.checkpoints() or job.code is not None:
            raise Wrong("to catch the SDK in its save", f"it was over: {names}")
        time.sleep(0.002)
    t0 = case.send(signal.SIGTERM, rank[1])
    case.figure(f"struck with {case.checkpoints() or 'no'} whole checkpoint")
    case.heard(job, t0)
    case.named(job, t0, "TERM", "rank 1")
    case.over(job, t0, 40, 75)
    n = case.agreed_stop(job, t0)
    case.check(n in case.checkpoints(), f"a whole checkpoint after {n} steps", str(case.checkpoints()))
    case.check(10 in case.checkpoints() or n > 10, "the save that was under way to be whole", str(case.checkpoints()))
    case.check(bool(case.events("own_handler", launch=1, rank=1)), "the script's own handler called on rank 1", "not called")
    case.silent_of(job, t0, r"never calls|hindered|died|\bcrash|HANG|cut\b", "nobody accused")
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",))
    case.again()
    case.check(case.first_step(2) == n, f"the rerun at step {n}", str(case.first_step(2)))
    case.once()
    case.same_end()


play(__file__, story, total=40)
