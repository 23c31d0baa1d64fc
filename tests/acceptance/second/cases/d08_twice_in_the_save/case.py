import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import signal
import time

import kit


def story(case):
    case.pace(step=0.2, save=12)
    job = case.start(*case.run())
    case.wait_event("step", step=13)
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.wait_event("saving", 30, slow=12)
    time.sleep(3)
    again = case.send(signal.SIGTERM, job.pid, *case.rank_pids().values())
    case.over(job, t0, 45, 75)
    case.agree({"preempted"}, 75)
    n = case.agreed_stop(job, t0)
    case.check([e["step"] for e in case.events("saved", slow=12)] == [n], f"one whole save, of step {n}", f"{case.events('saved', slow=12)}")
    case.check(len(case.events("saving", slow=12)) == 1, "the save made once", f"{len(case.events('saving', slow=12))} times")
    case.silent_of(job, again, r"not whole|cut short|was cut|ended in|killed", "no word of a cut save")
    case.only_incidents({"preemption"})
    case.pace(step=0.02, save=0)
    case.again()
    case.goes_on_at(2, n)
    case.once()
    case.same_end()


kit.play(__file__, story)
