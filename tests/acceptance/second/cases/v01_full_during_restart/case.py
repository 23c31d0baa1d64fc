import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import time

import kit


def story(case):
    disk = case.dir / "disk"
    case.tmpfs(disk, "size=24m,mode=0700")
    case.run_dir = disk / "run"
    case.pace(step=0.2, die_at=24)
    job = case.start(*case.run())
    case.wait_event("before_death", rank=1)
    case.fill(disk)
    case.touch("go")
    case.wait_event("up", count=4, limit=60)
    end = time.monotonic() + 90
    while time.monotonic() < end and job.code is None:  # until the save at 30 has failed
        second = [e["step"] for e in case.events("step", rank=0)][25:]
        if any(s >= 32 for s in second):
            break
        time.sleep(0.1)
    free = time.monotonic()
    (disk / "ballast").unlink()
    case.note("- room again")
    code = job.wait_end(330)
    case.check(code == 0, "exit code 0", f"{code}: {job.text()[-300:]!r}")
    case.figure(f"code {code} {((job.ended_at or free) - free):.0f} s after room")
    made = case.steps(0)
    back = [b for a, b in zip(made, made[1:]) if b <= a]
    case.check(back == [20], "one resume, at step 20", f"{back}")
    case.check("No space" in job.text() or "full" in job.text() or "space" in job.text(), "the failed save to be said", job.text()[-300:])
    case.check(len(case.events("up")) == 4, "two attempts", f"{len(case.events('up'))} starts of ranks")
    case.agree({"finished"}, 0)
    newest = case.checkpoints()
    case.check(newest and newest[-1] == 40, "a checkpoint of step 40", f"{newest}")
    case.same_end()
    again = case.again()
    case.check("finished" in again.text(), "the rerun to say that it is finished", again.text()[-200:])
    case.check(not case.steps(0, 2), "the rerun to make no step", f"{case.steps(0, 2)[:3]}")


kit.play(__file__, story, limit=560)
