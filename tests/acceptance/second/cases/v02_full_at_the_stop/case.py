import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import signal
import time

import kit


def story(case):
    disk = case.dir / "disk"
    case.tmpfs(disk, "size=24m,mode=0700")
    case.run_dir = disk / "run"
    case.pace(step=0.2)
    job = case.start(*case.run())
    case.wait_event("step", step=13)
    case.fill(disk)
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    time.sleep(max(0, t0 + 15 - time.monotonic()))
    case.check(job.code is None, "the save at the stop to be waited for", f"ended with {job.code} before there was room: {job.text(t0)[-300:]!r}")
    said = job.text(t0)
    case.check("space" in said.lower() or "full" in said.lower(), "the full disk to be said", repr(said[:300]))
    (disk / "ballast").unlink()
    case.note("- room again")
    case.over(job, t0, 75, 75)
    case.agree({"preempted"}, 75)
    n = case.agreed_stop(job, t0)
    case.check(n in case.checkpoints(), f"a checkpoint of step {n}", f"{case.checkpoints()}")
    case.only_incidents({"preemption"})
    case.pace(step=0.02)
    case.again()
    case.goes_on_at(2, n)
    case.once()
    case.same_end()


kit.play(__file__, story, limit=400)
