"""c22 supervise_pause: TERM to supervise while it waits before the retry. See expected.md."""

import signal
import time

from kit import Wrong, play

TRAIN = '''
import os
import sys
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import resilience_sdk
dist.init_process_group("gloo")
model, optimizer = work.make()
ddp = DistributedDataParallel(model)
loader = work.loader(work.TOTAL)
with resilience_sdk.start_run(state={"model": ddp, "optimizer": optimizer, "data": loader}, checkpoint_every=5) as run:
    for step, batch in run.steps(loader):
        if step == 17 and work.rank() == 1 and work.pace("crash", True):
            work.log("crash")
            os._exit(3)
        work.train(ddp, optimizer, step, int(batch[0]))
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    command = ["resilience", "supervise", "--run-dir", str(case.run_dir), "--", *case.run("train.py", "--max-restarts", "0")]
    job = case.start(*command)
    case.wait_event("crash")
    # the launcher has ended: nothing but the supervisor is there
    end = time.monotonic() + 60
    while time.monotonic() < end:
        others = [line for pid, line in case.alive() if pid != job.pid]
        if not others:
            break
        if job.code is not None or len(case.events("up", launch=1)) > 2:
            raise Wrong("a pause before the retry", f"none seen: code {job.code}, {len(case.events('up'))} starts")
        time.sleep(0.05)
    else:
        raise Wrong("the supervisor to be alone in its pause", str(others[:4]))
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.over(job, t0, 5, 75)
    case.check(len(case.events("up", launch=1)) == 2, "nothing started after the signal", f"{len(case.events('up', launch=1))} ranks")
    last = [text for _, text in job.product_lines()][-1:]
    case.check(bool(last) and "to resume" in last[0], "the last line to be the command that goes on", str(last))
    newest = max(case.checkpoints() or [0])
    case.check(newest == 15, "the checkpoint after 15 steps", str(case.checkpoints()))
    case.told_steps(job, t0, {15, 17})
    case.pace(crash=False)
    case.again(command)
    case.check(case.first_step(2) == 15, "the rerun at step 15", str(case.first_step(2)))
    case.same_end()


play(__file__, story, total=30)
