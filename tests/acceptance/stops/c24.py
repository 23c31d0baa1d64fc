"""c24 torchrun_auto_results: torchrun -m resilience_sdk.auto, rank 1 has ended, rank 0 writes results; TERM to torchrun. See expected.md."""

import signal
import time

from kit import Wrong, play

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
dist.destroy_process_group()
if work.rank() == 0:
    work.slow_results(work.pace("results", 20))
work.finish(model, work.TOTAL)
'''


def story(case):
    case.write("train.py", TRAIN)
    command = case.torchrun("-m", "resilience_sdk.auto", "train.py")
    options = {"env": {"RESILIENCE_RUN_DIR": str(case.run_dir)}}
    job = case.start(*command, **options)
    case.wait_event("results")
    case.wait_event("end", rank=1)
    end = time.monotonic() + 8
    while 1 in case.rank_pids() and time.monotonic() < end:
        time.sleep(0.1)
    case.figure("rank 1 had ended" if 1 not in case.rank_pids() else "rank 1 still there")
    if 0 not in case.rank_pids():
        raise Wrong("rank 0 to write its results", str(case.rank_pids()))
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.over(job, t0, 35, 1, gone=8)
    whole = bool(case.events("results_done", launch=1))
    case.figure("results whole" if whole else "results cut")
    case.told_steps(job, t0, {case.total})
    case.silent_of(job, t0, r"rank 1.*(ended|never|hinder|gone|died|exited)|ended before|hindered|never calls|unknown cause|\bcrash|rank_killed|finished: ", "rank 1 not accused, no crash, not finished")
    found = case.outcome()
    if whole and found.get("verdict") == "finished":
        case.figure("variant: finished")
    else:
        case.check(found.get("verdict") == "preempted" and found.get("exit_code") == 75, "outcome preempted, 75", str(found)[:200])
    case.only_incidents(("preemption",))
    for one in case.incidents():
        named = [c.get("rank") for c in one.get("culprits") or []]
        case.check(1 not in named, "rank 1 not among the culprits", str(named))
    case.pace(results=0.5)
    case.again(command, **options)
    case.check((case.dir / "results.txt").read_text().endswith("END\n"), "whole results in the end", "cut ones")
    case.same_end()


play(__file__, story, total=20)
