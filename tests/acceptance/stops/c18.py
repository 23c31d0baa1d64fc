"""c18 soft_limits_launcher: USR1 to the launcher alone, and XCPU if it goes on; unchanged script. See expected.md."""

import re
import shlex
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
    line = " ".join(shlex.quote(word) for word in case.run())
    case.write("job.sh", f"#!/bin/bash\n#SBATCH --signal=B:USR1@120\nexec {line}\n")
    job = case.start("bash", "job.sh")
    case.wait_event("step", step=8)
    t0 = case.send(signal.SIGUSR1, job.pid)
    case.heard(job, t0, r"SIGUSR1|USR1", "a word naming SIGUSR1")
    while job.code is None and time.monotonic() < t0 + 4:
        time.sleep(0.05)
    goes_on = job.code is None and not re.search(r"asked to leave|preempted", job.text(t0))
    if goes_on:
        case.figure("variant: USR1 answered, goes on")
        case.check(bool(re.search(r"preempt.signals", job.text(t0))), "the setting preempt_signals named", job.text(t0)[:300])
        t1 = case.send(signal.SIGXCPU, job.pid)
        got = job.wait_end(120)
        after, _ = job.first_word(t1, re.compile(r"XCPU"))
        case.figure("XCPU: no word" if after is None else f"XCPU: word {after:.1f} s")
        case.check(got in (0, 75), "0 or 75, the launcher does not die of XCPU", f"{got}")
        if got == 0:
            case.once()
        else:
            case.check(after is not None, "a word naming SIGXCPU", job.text(t1)[:200])
    else:
        got = job.wait_end(40)
        case.figure("variant: USR1 heard")
        case.check(got == 75, "75 after SIGUSR1 was heard", f"{got}: {job.text(t0)[-300:]!r}")
    case.figure(f"code {got}")
    if got is None:
        case.clean()
    left = case.wait_gone(3, t0)
    case.check(left is not None, "nothing left", str([line for _, line in case.alive()][:5]))
    if left is None:
        case.clean()
    case.silent_of(job, t0, r"unknown cause|\bcrash|never calls|hindered|restart \d|rank_killed", "no crash told, no restart")
    if got == 75:
        n = min(len(case.steps(0, 1)), len(case.steps(1, 1)))
        case.told_steps(job, t0, {n, n + 1, max(len(case.steps(0, 1)), len(case.steps(1, 1)))})
        case.silent_of(job, t0, r"\b0 steps (?:are |were )?lost", "nobody says that nothing is lost: the script saves nothing")
        case.agree(("preempted",), 75)
        case.again()
    elif got == 0:
        case.agree(("finished",), 0)
    case.same_end()


play(__file__, story, total=80)
