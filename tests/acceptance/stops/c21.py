"""c21 own_term_exit_0: the script's SIGTERM handler agrees, saves 5 s and leaves with 0; TERM to the launcher. See expected.md."""

import re
import signal

from kit import play

TRAIN = '''
import signal
import work
work.log("up")
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: (asked.append(number), work.log("own_handler")))
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model, optimizer = work.make()
first = work.load_own(model, optimizer)
ddp = DistributedDataParallel(model)
stopped = False
for step in range(first, work.TOTAL):
    work.train(ddp, optimizer, step)
    flag = torch.tensor([len(asked)])
    dist.all_reduce(flag)
    if flag.item():
        if work.rank() == 0:
            work.save_own(model, optimizer, step + 1, seconds=5)
        dist.barrier()
        stopped = True
        break
if not stopped:
    work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("step", step=12)
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.over(job, t0, 25, 75)
    n = case.agreed_stop(job, t0, journal=False)
    case.check(bool(case.events("saved", launch=1, step=n)), f"the script's own save after {n} steps, whole", str(case.events("saved", launch=1)))
    case.silent_of(job, t0, r"never calls|hindered|died|\bcrash|HANG|\bcut\b|finished: |incomplete", "nothing false told: a loop that did what it should")
    told = [text for _, text in job.product_lines(t0)]
    case.check(any(re.search(r"(?i)(cannot|can't|nobody|not known|unknown|by itself|its own|the script).*(lost|sav|load)|(lost|sav).*(cannot|nobody|not known|unknown|by itself|its own|the script)", text) for text in told), "it is said that nobody can tell what the script saved", str(told[-5:]))
    case.agree(("preempted",), 75)
    case.check(case.state().get("state") != "finished", "no finished flag", "finished")
    case.only_incidents(("preemption",))
    case.again()
    case.check(case.first_step(2) == n, f"the rerun at the script's step {n}", str(case.first_step(2)))
    case.once()
    case.same_end()


play(__file__, story, total=40)
