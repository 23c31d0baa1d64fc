import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import time

import kit

AFTER = 40


def story(case):
    case.total = 200
    case.pace(total=200, step=0.3)
    job = case.start("timeout", "--preserve-status", "-s", "USR1", str(AFTER), *case.run())
    while time.monotonic() < job.began_at + AFTER and job.code is None:
        time.sleep(0.02)
    t0 = job.began_at + AFTER
    if not case.steps(0) or job.code is not None:
        raise kit.Wrong("the training to be under way when timeout strikes (else the case is unsound)", f"code {job.code}, {len(case.steps(0))} steps")
    case.heard(job, t0)
    case.named(job, t0, "SIGUSR1")
    case.over(job, t0, 40, 75)
    case.agree({"preempted"}, 75)
    n = case.agreed_stop(job, t0)
    case.only_incidents({"preemption"})
    case.pace(total=200, step=0.02)
    case.again(case.run())
    case.goes_on_at(2, n)
    case.once(200)
    case.same_end()


kit.play(__file__, story)
