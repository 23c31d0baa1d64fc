import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import signal

import kit


def story(case):
    case.ranks = 1
    case.pace(step=0.2)
    job = case.start(*case.run(ranks=1))
    case.wait_event("step", step=24)
    t0 = case.send(signal.SIGTERM, case.rank_pids()[0])
    case.heard(job, t0)
    case.over(job, t0, 25, 75, gone=5)
    case.agree({"preempted"}, 75)
    case.silent_of(job, t0, r"\b0 steps? (are |were )?lost", "no claim that nothing is lost (4 to 6 steps are)")
    case.only_incidents({"preemption"})
    case.pace(step=0.02)
    case.again()
    case.goes_on_at(2, 20)
    case.same_end()


kit.play(__file__, story)
