"""c15 ctrl_c_twice_tee: on a terminal, `resilience run ... 2>&1 | tee`, Ctrl-C twice. See expected.md."""

import shlex
import time

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
    line = " ".join(shlex.quote(word) for word in command)
    # as a shell on a terminal does it: all of the pipe is in the foreground and gets the Ctrl-C; the shell itself lives on
    case.write("typed.sh", f"trap : INT\n{line} 2>&1 | tee screen.log\necho ${{PIPESTATUS[0]}} > code\n")
    job = case.start("bash", "typed.sh", tty=True)
    case.wait_event("step", step=24)
    t0 = time.monotonic()
    job.type(b"\x03")
    case.note("- Ctrl-C")
    time.sleep(0.5)
    job.type(b"\x03")
    case.note("- Ctrl-C again")
    got = job.wait_end(40)
    if got is None:
        case.check(False, "an end within 20 s", f"{case.alive()[:4]}")
        case.clean()
    else:
        case.figure(f"end {job.ended_at - t0:.1f} s")
        case.check(job.ended_at - t0 <= 20, "an end within 20 s", f"{job.ended_at - t0:.1f} s")
    left = case.wait_gone(3, t0)
    case.check(left is not None, "nothing left", str([line for _, line in case.alive()][:5]))
    if left is None:
        case.clean()
    else:
        case.figure(f"gone {left:.1f} s")
    try:
        code = (case.dir / "code").read_text().strip()
    except OSError as error:
        code = str(error)
    case.check(code == "130", "exit code 130 in PIPESTATUS", code)
    case.check(not case.own_trace(job), "no traceback of the product", case.own_trace(job)[-200:])
    after, _ = job.first_word(t0)
    case.figure("word lost with tee" if after is None else f"word {after:.1f} s")
    case.silent_of(job, t0, r"never calls|hindered|\bcrash|HANG|restart \d", "nobody accused, no restart")
    case.agree(("interrupted",), 130)
    newest = max(case.checkpoints() or [0])
    case.check(newest >= 20, "the checkpoint after 20 steps", str(case.checkpoints()))
    made = len(case.steps(0, 1))
    case.figure(f"{made} steps, checkpoint {newest}")
    case.again(command)
    case.check(case.first_step(2) == newest, f"the rerun at the newest checkpoint {newest}", str(case.first_step(2)))
    case.same_end()


play(__file__, story, total=40)
