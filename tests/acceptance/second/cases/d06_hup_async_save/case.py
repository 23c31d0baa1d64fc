import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import signal

import kit


def story(case):
    values = {"async": True, "megabytes": 64}
    case.pace(step=0.2, **values)
    job = case.start(*case.run(), session=True)
    case.wait_event("step", step=10)
    t0 = case.send(signal.SIGHUP, job.pid)
    case.heard(job, t0)
    case.named(job, t0, "SIGHUP")
    case.over(job, t0, 40, 75)
    case.agree({"preempted"}, 75)
    n = case.agreed_stop(job, t0)
    case.check(n in case.checkpoints(), f"a checkpoint of step {n}", f"{case.checkpoints()}")
    case.only_incidents({"preemption"})
    case.pace(step=0.02, **values)
    case.again()
    case.goes_on_at(2, n)
    case.once()
    case.same_end()


kit.play(__file__, story)
