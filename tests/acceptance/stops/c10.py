"""c10 dataloader_cgroup: TERM to every process of the job while its ranks wait for a DataLoader worker. See expected.md."""

import signal

from kit import play

TRAIN = '''
import time
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from resilience_sdk import heartbeat, preemption


class Numbers(Dataset):
    """The indices of this rank's steps from `first` on; that of step 20 comes from a slow place."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return work.TOTAL - self.first

    def __getitem__(self, at):
        step = self.first + at
        if step == 20 and work.pace("data", 6):
            work.log("worker_wait")
            time.sleep(work.pace("data", 6))
        return step * work.world() + work.rank()


dist.init_process_group("gloo")
model, optimizer = work.make()
first = work.load_own(model, optimizer)
ddp = DistributedDataParallel(model)
preemption.time_left()  # before the loader is iterated, as the documentation says
loader = DataLoader(Numbers(first), batch_size=1, num_workers=2)
for step, batch in enumerate(loader, start=first):
    with heartbeat(step=step):
        work.train(ddp, optimizer, step, int(batch[0]))
    if preemption.check(step):
        if work.rank() == 0:
            work.save_own(model, optimizer, step + 1)
        dist.barrier()
        preemption.exit()
heartbeat.done()
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("worker_wait", count=2)
    for rank in (0, 1):
        case.wait_event("step", step=19, rank=rank)
    everybody = [pid for pid, _ in case.alive()]
    case.figure(f"TERM to {len(everybody)} processes")
    t0 = case.send(signal.SIGTERM, *everybody)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.over(job, t0, 25, 75)
    n = case.agreed_stop(job, t0)
    case.check(n >= 20, "the stop behind the data that were waited for", str(n))
    case.check(bool(case.events("saved", launch=1, step=n)), f"the script's own save after {n} steps", str(case.events("saved", launch=1)))
    case.silent_of(job, t0, r"(?i)worker.*(died|killed|exit|gone)|died|\bcrash|never calls|hindered|HANG|monitor (?:was|is) (?:killed|gone)", "no death of a worker or a rank told, nobody accused")
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",))
    case.pace(data=0)
    case.again()
    case.check(case.first_step(2) == n, f"the rerun at step {n}", str(case.first_step(2)))
    case.once()
    case.same_end()


play(__file__, story, total=40)
