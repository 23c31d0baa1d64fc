"""c16 terminal_closed: the terminal of the launcher is closed (ssh drops, tmux kill-session). See expected.md."""

import re

from kit import play

TRAIN = '''
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import resilience_sdk
dist.init_process_group("gloo")
model, optimizer = work.make()
ddp = DistributedDataParallel(model)
loader = work.loader(work.TOTAL)
with resilience_sdk.start_run(state={"model": ddp, "optimizer": optimizer, "data": loader}, checkpoint_every=10) as run:
    for step, batch in run.steps(loader):
        work.train(ddp, optimizer, step, int(batch[0]))
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    command = case.run()
    job = case.start(*command, tty=True)
    case.wait_event("step", step=14)
    t0 = job.hang_up()  # the kernel sends SIGHUP to the session's leader, which is the launcher; nothing can be printed any more
    got = job.wait_end(40)
    if got is None:
        case.check(False, "an end within 20 s", str(case.alive()[:4]))
        case.clean()
    else:
        case.figure(f"code {got}, end {job.ended_at - t0:.1f} s")
        case.check(got in (75, 130), "exit code 75 or 130, not a silent death", str(got))
        case.check(job.ended_at - t0 <= 20, "an end within 20 s", f"{job.ended_at - t0:.1f} s")
    left = case.wait_gone(3, t0)
    case.check(left is not None, "nothing left", str([line for _, line in case.alive()][:5]))
    if left is None:
        case.clean()
    else:
        case.figure(f"gone {left:.1f} s")
    found = case.outcome()
    case.check(found.get("verdict") in ("preempted", "interrupted"), "an outcome preempted or interrupted", str(found)[:200])
    case.check(found.get("exit_code") == got, f"the outcome's code {got}", str(found.get("exit_code")))
    words = f"{found.get('reason')} {found.get('what')}"
    case.check(bool(re.search(r"SIGHUP|hang|hung|terminal", words, re.I)), "a reason that names the hangup", words[:200])
    case.only_incidents(("preemption",))
    newest = max(case.checkpoints() or [0])
    n = len(case.steps(0, 1))
    case.figure(f"{n} steps, checkpoint {newest}")
    case.check(newest >= 10, "the checkpoint after 10 steps", str(case.checkpoints()))
    if got == 75:
        case.check(newest == n, f"a checkpoint at the stop ({n})", str(newest))
    case.again(command)
    case.check(case.first_step(2) == newest, f"the rerun at the newest checkpoint {newest}", str(case.first_step(2)))
    if got == 75:
        case.once()
    case.same_end()


play(__file__, story, total=40)
