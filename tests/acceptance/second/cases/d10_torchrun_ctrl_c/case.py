import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib"))
import time

import kit


def story(case):
    case.env["RESILIENCE_RUN_DIR"] = str(case.run_dir)
    case.pace(step=0.2)
    argv = case.torchrun("train.py")
    job = case.start(*argv, tty=True)
    case.wait_event("step", step=14)
    t0, wall = time.monotonic(), time.time()
    job.type(b"\x03")
    case.note("- Ctrl-C typed")
    while time.monotonic() < t0 + kit.HEARD and job.first_word(t0)[0] is None:
        time.sleep(0.05)
    after, text = job.first_word(t0)
    if after is None:  # the log counts where the screen is torchrun's
        log = [e for e in case.journal() if isinstance(e.get("t"), (int, float)) and wall <= e["t"] <= wall + kit.HEARD + 0.5 and kit.STOP_WORD.search(str(e))]
        case.figure(f"word in the journal: {log[0].get('event') or log[0].get('kind')}" if log else "word never")
        case.check(bool(log), "a word about the stop on the screen or in the journal in 5 s", f"none; {job.text(t0)[:300]!r}")
    else:
        case.figure(f"word {after:.1f} s")
    case.over(job, t0, 45, (1, 130, -2), gone=8)
    case.agree({"interrupted"}, 130)
    case.only_incidents({"preemption"})
    newest = (case.checkpoints() or [0])[-1]
    case.true_losses(job, t0, {max(0, len(case.steps(0)) - newest + d) for d in (-1, 0, 1)})
    case.check(newest >= 10, "a checkpoint", f"{case.checkpoints()}")
    case.pace(step=0.02)
    case.again(argv)
    case.goes_on_at(2, newest)
    case.same_end()


kit.play(__file__, story)
