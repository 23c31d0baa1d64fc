"""c17 nohup: `nohup resilience run`, HUP to its process group; it goes on. See expected.md."""

import os
import signal
import time

from kit import play

TRAIN = '''
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model, optimizer = work.make()
ddp = DistributedDataParallel(model)
for step in range(work.TOTAL):
    work.train(ddp, optimizer, step)
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    job = case.start("nohup", *case.run())
    case.wait_event("step", step=5)
    ranks = case.rank_pids()
    t0 = time.monotonic()
    case.note(f"- HUP to the process group {job.pid}, then to each rank {ranks}")
    os.killpg(job.pid, signal.SIGHUP)
    case.send(signal.SIGHUP, *ranks.values())
    time.sleep(2)
    os.killpg(job.pid, signal.SIGHUP) if job.code is None else None
    got = job.wait_end(90)
    if got is None:
        case.clean()
    case.figure(f"code {got}")
    case.check(got == 0, "0: a job under nohup goes on", f"{got}: {job.text(t0)[-300:]!r}")
    left = case.wait_gone(5, t0)
    case.check(left is not None, "nothing left", str(case.alive()[:4]))
    case.silent_of(job, t0, r"asked to leave|preempted|interrupted|died|restart \d|starting the ranks again", "no word of leaving or of a death")
    case.once()
    case.same_end()
    case.agree(("finished",), 0)
    case.only_incidents(())


play(__file__, story, total=60)
