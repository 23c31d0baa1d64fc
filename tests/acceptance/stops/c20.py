"""c20 own_usr1_then_term: a script with its own SIGUSR1 save; USR1 and 3 s later TERM to launcher and ranks. See expected.md."""

import signal
import time

from kit import play

TRAIN = '''
import signal
import work
work.log("up")
asked = []
signal.signal(signal.SIGUSR1, lambda number, frame: (asked.append(number), work.log("usr1")))
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model, optimizer = work.make()
first = work.load_own(model, optimizer)
ddp = DistributedDataParallel(model)
for step in range(first, work.TOTAL):
    work.train(ddp, optimizer, step)
    flag = torch.tensor([len(asked)])
    dist.all_reduce(flag)
    if flag.item():
        asked.clear()
        if work.rank() == 0:
            work.save_own(model, optimizer, step + 1)
        dist.barrier()
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("step", step=8, count=2)
    ranks = case.rank_pids()
    t0 = case.send(signal.SIGUSR1, job.pid, *ranks.values())
    case.wait_event("saved", limit=8)
    while time.monotonic() < t0 + 3 and job.code is None:
        time.sleep(0.05)
    early = job.code
    t1 = None
    if early is None:
        t1 = case.send(signal.SIGTERM, job.pid, *[p for p in case.rank_pids().values()])
    else:
        case.figure(f"ended with {early} after USR1")
    case.heard(job, t0, r"USR1", "a word naming SIGUSR1", label="USR1: word")
    if t1:
        case.heard(job, t1, r"TERM", "a word naming SIGTERM", label="TERM: word")
    case.over(job, t1 or t0, 30, 75)
    handlers = {e["rank"] for e in case.events("usr1", launch=1)}
    case.check(handlers == {0, 1}, "the script's own SIGUSR1 handler on both ranks", str(handlers))
    saves = [e["step"] for e in case.events("saved", launch=1)]
    case.check(bool(saves), "the script's own save", "none")
    known = {len(case.steps(0, 1)), len(case.steps(1, 1))} | set(saves)
    case.told_steps(job, t0, known | {max(known) + 1})
    case.silent_of(job, t0, r"unknown cause|\bcrash|never calls|hindered|restart \d|rank_killed|\b0 steps (?:are |were )?lost", "nothing false told")
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",), no_culprits=False)
    case.again()
    case.check(case.first_step(2) == max(saves or [0]), f"the rerun from the script's save {max(saves or [0])}", str(case.first_step(2)))
    case.same_end()


play(__file__, story, total=60)
