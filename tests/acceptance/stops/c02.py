"""c02 in_import: TERM to launcher and both ranks while the script imports. See expected.md."""

import signal

from kit import play

SLOW = '''
import work
work.log("importing")
work.busy(work.pace("import", 8))
work.log("imported")
'''
TRAIN = '''
import work
work.log("up")
import slow_library
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
    case.write("slow_library.py", SLOW)
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("importing", count=2)
    ranks = case.rank_pids()
    t0 = case.send(signal.SIGTERM, job.pid, *ranks.values())
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.over(job, t0, 10, 75)
    case.check(len(case.events("importing", launch=1)) == 2, "no rank started again", f"{len(case.events('importing', launch=1))} imports begun")
    case.told_steps(job, t0, {0})
    case.silent_of(job, t0, r"\bcrash|unknown|never calls|hindered|restart \d|starting the ranks again|[1-9]\d* steps? (?:are |were )?lost", "nobody accused, no restart, nothing lost")
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",))
    case.pace(**{"import": 0.2})
    case.again()
    case.check(case.first_step(2) == 0, "the rerun from step 0", str(case.first_step(2)))
    case.once()
    case.same_end()


play(__file__, story, total=20)
