"""c06 own_save_cut: TERM to the launcher in the middle of a save of the script's own. See expected.md."""

import re
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
first = work.load_own(model, optimizer)
ddp = DistributedDataParallel(model)
for step in range(first, work.TOTAL):
    work.train(ddp, optimizer, step)
    done = step + 1
    if done % 10 == 0:
        if work.rank() == 0:
            # written in place, each under its own name; the second one meets a slow storage
            work.save_own(model, optimizer, done, seconds=work.pace("save", 12) if done == 20 else 0, whole=False)
        dist.barrier()
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    job = case.start(*case.run())
    case.wait_event("saving", step=20)
    path = case.dir / "ckpt-0020.pt"
    while not (path.exists() and path.stat().st_size > 200_000) and not case.events("saved", step=20) and job.code is None:
        time.sleep(0.02)
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.over(job, t0, 25, 75)
    whole = bool(case.events("saved", step=20, launch=1))
    case.figure("variant: save became whole" if whole else "variant: save was cut")
    told = [text for _, text in job.product_lines(t0)]
    cut = re.compile(r"(?=.*(sav|checkpoint|writ|ckpt))(?=.*(\bcut|incomplete|half|interrupt|not (complete|finished|whole)|partial|\btorn|unfinished|in the middle|broken off))", re.I)
    if whole:
        case.silent_of(job, t0, r"(?i)\bcut\b|incomplete|\btorn\b|unfinished|broken off", "no cut save told where it became whole")
    else:
        at = next((n for n, text in enumerate(told) if cut.search(text)), None)
        verdict = next((n for n, text in enumerate(told) if re.search(r"preempted|exit code", text)), len(told))
        case.check(at is not None and (at <= 1 or at < verdict), "the cut save in the first two lines about the stop, or before the verdict", f"line {at} of {told[:4]}")
        case.check(any(re.search(r"lost|repeat|again from|starts? over|since|newest|older", text, re.I) for text in told), "what is lost to be said", str(told[-4:]))
        case.silent_of(job, t0, r"\b0 steps (?:are |were )?lost|nothing (?:is|was) lost|no steps? (?:is|are|was|were)? ?lost", "nobody says that nothing is lost")
    case.told_steps(job, t0, {10, 20})
    case.silent_of(job, t0, r"rank_killed|unknown cause|\bcrash|restart \d", "no crash told")
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",), no_culprits=False)
    case.pace(save=0.5)
    case.again()
    case.check(case.first_step(2) == (20 if whole else 10), f"the rerun from step {20 if whole else 10}", str(case.first_step(2)))
    case.same_end()


play(__file__, story, total=30)
