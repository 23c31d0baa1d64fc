import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import signal
import time

import kit


def story(case):
    case.pace(step=0.2, total=60)
    case.total = 60
    job = case.start(*case.run())
    case.wait_event("step", step=12)
    before = time.monotonic()
    t1 = case.send(signal.SIGUSR1, case.rank_pids()[1])
    time.sleep(4)
    case.check(job.code is None, "training to go on after the script's own SIGUSR1", f"ended with {job.code}")
    stacks = (case.dir / "stacks-1.txt").read_text()
    case.check("train.py" in stacks, "the stacks that the script asked for", repr(stacks[:200]))
    last = (case.steps(1) or [0])[-1]
    case.check(last >= 12 + 6, "steps to go on meanwhile", f"step {last}")
    case.silent_of(job, t1, r"asked to leave|stopped|preempt|restart", "no word of leaving after the script's own SIGUSR1")
    case.check(len(case.events("up")) == 2, "no restart", f"{len(case.events('up'))} starts")
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.over(job, t0, 40, 75)
    case.agree({"preempted"}, 75)
    n = case.agreed_stop(job, t0)
    case.check(n in case.checkpoints(), f"a checkpoint of step {n}", f"{case.checkpoints()}")
    case.only_incidents({"preemption"})
    case.pace(step=0.02, total=60)
    case.again()
    case.goes_on_at(2, n)
    case.once()
    case.same_end()


kit.play(__file__, story)
