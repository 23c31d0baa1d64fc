import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import os
import shutil
import time

import kit


def story(case):
    scratch = case.dir / "scratch" / "exp1"
    scratch.mkdir(parents=True, mode=0o700)
    case.run_dir.mkdir(mode=0o700)
    os.symlink(scratch, case.run_dir / "checkpoints")
    case.pace(step=0.25)
    job = case.start(*case.run())
    case.wait_event("step", 150, step=13)
    case.check(10 in case.checkpoints(), "a checkpoint of step 10 behind the link", f"{case.checkpoints()}")
    t0 = time.monotonic()
    shutil.rmtree(scratch)
    case.note("- the target of the link is removed")
    code = job.wait_end(420)
    if code is None:
        case.check(False, "an end (wait_limit is 300 s)", f"it still runs: {job.text(t0)[-300:]!r}")
        case.clean()
        return
    case.figure(f"code {code} after {job.ended_at - t0:.0f} s")
    case.wait_gone(5, job.ended_at)
    finished, newest = (case.run_dir / "finished").exists(), case.checkpoints()
    case.figure(f"checkpoints {newest}")
    case.check(code in (0, 1), "exit code 0 or 1", f"{code}: {job.text(t0)[-300:]!r}")
    found = case.outcome()
    case.check(found.get("exit_code") == code, "outcome to agree", f"{found}"[:200])
    if code == 0:
        case.check(finished and newest[-1:] == [40], "0 only with a checkpoint of step 40 (never finished with nothing saved)", f"finished {finished}, {newest}")
        case.same_end()
        case.again()
        case.check(not case.steps(0, 2), "the rerun to make no step", f"{case.steps(0, 2)[:3]}")
        return
    case.check(not finished, "no finished flag", "finished")
    case.check(bool(job.product_lines(t0)) and "checkpoints" in job.text(t0), "the place that is gone to be named", repr(job.text(t0)[-300:]))
    case.check("lost" in job.text(t0) or "not saved" in job.text(t0) or "nothing" in job.text(t0), "the loss to be told", repr(job.text(t0)[-400:]))
    case.true_losses(job, t0, {40})
    scratch.mkdir(parents=True, mode=0o700, exist_ok=True)
    case.pace(step=0.02)
    case.again()
    case.goes_on_at(2, (newest or [0])[-1])
    case.same_end()


kit.play(__file__, story, limit=700)
