import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import re
import signal

import kit


def story(case):
    case.pace(step=0.2)
    job = case.start("bash", "-c", "bash job.sh; code=$?; echo outer: $code; exit $code")
    case.wait_event("step", step=13)
    inner = int((case.dir / "job.pid").read_text())
    t0 = case.send(signal.SIGTERM, inner)
    case.heard(job, t0)
    case.over(job, t0, 40, 75)
    case.agree({"preempted"}, 75)
    n = case.agreed_stop(job, t0)
    case.silent_of(job, t0, r"\b\d+ steps? (are |were )?lost", "no number of lost steps, for the loop saves without the SDK")
    case.only_incidents({"preemption"})
    case.pace(step=0.02)
    case.again()
    case.goes_on_at(2, n)
    case.once()
    case.same_end()


kit.play(__file__, story)
