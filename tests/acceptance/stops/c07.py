"""c07 grace_too_short: timeout -k 8, the script's own SIGTERM save takes 25 s. See expected.md."""

import signal
import time

from kit import play

TRAIN = '''
import signal
import sys
import work
work.log("up")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: (asked.append(number), work.log("own_handler")))
dist.init_process_group("gloo")
model, optimizer = work.make()
first = work.load_own(model, optimizer)
ddp = DistributedDataParallel(model)
for step in range(first, work.TOTAL):
    work.train(ddp, optimizer, step)
    flag = torch.tensor([len(asked)])
    dist.all_reduce(flag)
    if flag.item():
        if work.rank() == 0:
            work.save_own(model, optimizer, step + 1, seconds=25)  # by a temporary name
        dist.barrier()
        sys.exit(0)
    if (step + 1) % 10 == 0:
        if work.rank() == 0:
            work.save_own(model, optimizer, step + 1)
        dist.barrier()
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    command = ["timeout", "-k", "8", "900", *case.run()]
    job = case.start(*command)
    case.wait_event("step", step=13)
    # what `timeout` does when its time is over it also does when it gets the signal: TERM to the child, TERM to the group, KILL 8 s later
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    got = job.wait_end(8 + 30)
    case.check(got in (137, -9), "137, the KILL of timeout -k", str(got))
    if got is None:
        case.clean()
    took = (job.ended_at or time.monotonic()) - t0
    case.figure(f"end {took:.1f} s, code {got}")
    handlers = {e["rank"] for e in case.events("own_handler", launch=1)}
    case.check(handlers == {0, 1}, "the script's own handler on both ranks", str(handlers))
    saved = [e["step"] for e in case.events("saved", launch=1)]
    case.check(bool(case.events("saving", launch=1, step=(case.steps(0, 1) or [0])[-1] + 1)), "the script's save to have begun", str(case.events("saving", launch=1)[-1:]))
    left = case.wait_gone(5, job.ended_at or t0)
    case.check(left is not None, "nothing left 5 s after the KILL of the launcher, ranks in mid-save too", str([line for _, line in case.alive()][:5]))
    if left is None:
        case.clean()
    else:
        case.figure(f"gone {left:.1f} s after the KILL")
    case.silent_of(job, t0, r"\b0 steps (?:are |were )?lost|finished|\bsaved: ", "nobody says that it was saved or finished")
    state = case.state()
    case.check(state.get("state") not in ("finished", "running", None), "status neither finished nor running", str(state.get("state")))
    case.check(case.outcome().get("verdict") != "finished", "no finished outcome", "finished")
    rerun = case.again()
    newest = max(saved or [0])
    case.check(case.first_step(2) == newest, f"the rerun from the script's last whole save ({newest})", str(case.first_step(2)))
    begun = case.events("up", launch=2)
    if begun:
        wait = begun[0]["t"] - rerun.began_at
        case.figure(f"ranks of the rerun after {wait:.1f} s")
        case.check(wait < 30, "the rerun to start at once (dead owner on this host)", f"{wait:.0f} s")
    case.same_end()


play(__file__, story, total=30)
