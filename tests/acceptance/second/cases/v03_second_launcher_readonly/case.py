import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import subprocess
import time

import kit


def story(case):
    port = kit.free_port()

    def launch(options=()):
        return [
            "resilience", "run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "second",
            "--run-dir", str(case.run_dir), "train.py",
        ]

    case.pace(step=0.25)
    first = case.start(*launch())
    time.sleep(3)
    second = case.beside("unshare", "-m", "--propagation", "private", *launch())
    case.wait_event("step", 150, job=first, step=11)
    place = case.run_dir / "checkpoints"
    if 10 not in case.checkpoints():
        raise kit.Wrong("a checkpoint after 10 steps", f"{case.checkpoints()}")
    enter = ["nsenter", "-t", str(second.pid), "-m", "sh", "-c", f"mount --bind {place} {place} && mount -o remount,ro,bind {place}"]
    done = subprocess.run(enter, capture_output=True, text=True)
    if done.returncode:
        raise kit.Wrong("a read-only mount for the second launcher (root)", done.stderr)
    t0 = time.monotonic()
    case.note("- checkpoints are read-only for the second launcher")
    codes = [first.wait_end(400), second.wait_end(60)]
    if None in codes:
        case.check(False, "both launchers to end", f"{codes}: {first.text(t0)[-300:]!r}")
        case.clean()
    case.figure(f"codes {codes}")
    case.wait_gone(5, t0)
    newest = case.checkpoints()
    finished = (case.run_dir / "finished").exists()
    said = first.text(t0) + second.text(t0)
    if codes == [0, 0]:
        case.figure("variant: not bitten")
        case.check(finished and newest[-1:] == [40], "finished with a checkpoint of step 40", f"finished {finished}, {newest}")
        case.same_end()
        return
    case.check(codes == [1, 1], "both launchers to end with 1", f"{codes}: {first.text(t0)[-400:]!r}")
    case.check(not finished, "no finished flag", "finished")
    case.check("ead-only" in said, "the read-only file system to be named", repr(said[-400:]))
    keep = (newest or [0])[-1]
    case.check(keep >= 10, "the checkpoint after 10 steps kept", f"{newest}")
    case.check(str(keep) in said, f"the newest good checkpoint ({keep}) to be told", repr(said[-500:]))
    for job in (first, second):
        case.true_losses(job, t0, {40 - keep, 30, 20, 10})
    case.agree({"give_up", "stop", "hardware"}, 1)
    case.pace(step=0.02)
    case.launches += 1
    jobs = [case.beside(*launch()), case.beside(*launch())]
    codes = [job.wait_end(150) for job in jobs]
    case.check(codes == [0, 0], "the rerun of both to end with 0", f"{codes}: {jobs[0].text()[-300:]!r}")
    case.goes_on_at(2, keep)
    case.same_end()


kit.play(__file__, story, limit=740)
