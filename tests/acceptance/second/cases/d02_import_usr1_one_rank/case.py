import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import signal
import time

import kit


def story(case):
    case.pace(step=0.05)
    job = case.start(*case.run("pkg.train", "-m"))
    case.wait_event("importing", count=2)
    time.sleep(1.5)
    up = [e for e in case.events("up", launch=1) if e["rank"] == 1][0]
    t0 = case.send(signal.SIGUSR1, up["host_pid"])
    case.heard(job, t0)
    case.named(job, t0, "SIGUSR1")
    case.over(job, t0, 25, 75)
    case.agree({"preempted"}, 75)
    case.check(len(case.events("importing")) == 2, "each rank to import once (no restart)", f"{len(case.events('importing'))} imports")
    case.check(not case.events("imported", rank=1), "rank 1 to leave in its import", "it went on")
    case.only_incidents({"preemption"})
    case.silent_of(job, t0, kit.ACCUSES, "nobody accused")
    case.pace(**{"import": 0.5, "step": 0.02})
    case.again()
    case.once()
    case.same_end()


kit.play(__file__, story)
