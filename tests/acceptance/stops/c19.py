"""c19 notify_usr2: primitives, USR2 to launcher and all ranks within an evaluation, default settings. See expected.md."""

import re
import signal

from kit import play

TRAIN = '''
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from resilience_sdk import heartbeat, preemption
dist.init_process_group("gloo")
model, optimizer = work.make()
first = work.load_own(model, optimizer)
ddp = DistributedDataParallel(model)
for step in range(first, work.TOTAL):
    with heartbeat(step=step):
        work.train(ddp, optimizer, step)
    done = step + 1
    stop = preemption.check(step)
    if stop or done % 10 == 0:
        if work.rank() == 0:
            work.save_own(model, optimizer, done)
        dist.barrier()
    if stop:
        preemption.exit()
    if done == 20:
        work.log("eval")
        work.busy(work.pace("eval", 8))
        work.log("eval_done")
heartbeat.done()
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("eval", count=2)
    ranks = case.rank_pids()
    t0 = case.send(signal.SIGUSR2, job.pid, *ranks.values())
    case.heard(job, t0, r"USR2", "a word naming SIGUSR2")
    got = job.wait_end(90)
    case.figure(f"code {got}")
    case.check(got in (0, 75), "75 (heard) or 0 (answered), no silent death", f"{got}: {job.text(t0)[-300:]!r}")
    if got is None:
        case.clean()
    left = case.wait_gone(4, t0)
    case.check(left is not None, "nothing left", str(case.alive()[:4]))
    attempts = {e["attempt"] for e in case.events("up", launch=1)}
    case.silent_of(job, t0, r"unknown cause|cause unknown|never calls|does not call|hindered|user_code_error|HANG", "no false cause, nobody accused")
    if got == 75:
        case.figure("variant: heard")
        case.check(job.ended_at - t0 < 30, "an end in 30 s", f"{job.ended_at - t0:.0f} s")
        n = case.agreed_stop(job, t0)
        case.check(bool(case.events("saved", launch=1, step=n)), f"the script's own save after {n} steps", str(case.events("saved", launch=1)[-1:]))
        case.agree(("preempted",), 75)
        case.only_incidents(("preemption",))
        case.pace(eval=0.3)
        case.again()
        case.check(case.first_step(2) == n, f"the rerun at step {n}", str(case.first_step(2)))
        case.once()
    else:
        case.check(bool(re.search(r"preempt.signals", job.text(t0))), "the setting preempt_signals named", job.text(t0)[:300])
        case.figure("variant: answered" if len(attempts) == 1 else "variant: ranks died of it, told and restarted")
        if len(attempts) == 1 and got == 0:
            case.once()
    case.same_end()


play(__file__, story, total=40)
