import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import signal
import time

import kit


def story(case):
    case.total = 18
    case.pace(total=18, eval=1.0, step=0.2)
    job = case.start(*case.run())
    case.wait_event("eval", 150, step=6)
    time.sleep(2)
    t0 = case.send(signal.SIGINT, job.pid)
    time.sleep(1)
    case.send(signal.SIGINT, job.pid)
    case.heard(job, t0)
    case.over(job, t0, 25, 130, gone=5)
    case.agree({"interrupted"}, 130)
    case.true_losses(job, t0, {1})
    case.told_steps(job, t0, {5, 6})
    case.only_incidents({"preemption"})
    case.pace(total=18, eval=0.02, step=0.02)
    case.again()
    case.goes_on_at(2, 5)
    case.same_end()


kit.play(__file__, story)
