"""c12 results_after_loop: the loop is over, rank 1 has ended, rank 0 writes results for 20 s; TERM to rank 0. See expected.md."""

import signal
import time

from kit import Wrong, play

TRAIN = '''
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import resilience_sdk
dist.init_process_group("gloo")
model, optimizer = work.make()
ddp = DistributedDataParallel(model)
loader = work.loader(work.TOTAL)
with resilience_sdk.start_run(state={"model": ddp, "optimizer": optimizer, "data": loader}, checkpoint_every=10) as run:
    for step, batch in run.steps(loader):
        work.train(ddp, optimizer, step, int(batch[0]))
dist.destroy_process_group()
if work.rank() == 0 and not work.whole_results():
    work.slow_results(work.pace("results", 20))
work.finish(model, work.TOTAL)
'''


def story(case):
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("results")
    case.wait_event("end", rank=1)
    end = time.monotonic() + 8
    while 1 in case.rank_pids() and time.monotonic() < end:
        time.sleep(0.1)
    rank = case.rank_pids()
    case.figure("rank 1 had ended" if 1 not in rank else "rank 1 still there")
    if 0 not in rank:
        raise Wrong("rank 0 to write its results", str(rank))
    t0 = case.send(signal.SIGTERM, rank[0])
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    code = case.over(job, t0, 35, (0, 75))
    case.check(bool(case.events("results_done", launch=1)), "whole results (20 s < preempt_time 60 s)", "they were cut")
    case.figure(f"variant: {'finished' if code == 0 else 'stopped'}")
    case.told_steps(job, t0, {case.total} | set(case.checkpoints()))
    case.silent_of(job, t0, r"rank 1.*(ended|never|hinder|gone|died|exited)|ended before|hindered|never calls|does not call|\bcrash|died|[1-9]\d* steps? (?:are |were )?lost", "neither rank accused, nothing lost")
    if code == 0:
        case.agree(("finished",), 0)
    else:
        case.agree(("preempted",), 75)
    case.only_incidents(("preemption",))
    case.pace(results=0.5)
    case.again()
    case.once()
    case.check((case.dir / "results.txt").read_text().endswith("END\n"), "whole results in the end", "cut ones")
    case.same_end()


play(__file__, story, total=20)
