"""c14 atexit_lsf: all steps done, rank 0 in an atexit upload; LSF bkill: INT, TERM +10 s, KILL +20 s. See expected.md."""

import signal
import time

from kit import play

TRAIN = '''
import atexit
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import resilience_sdk


def upload():
    if work.rank() == 0:
        work.log("upload")
        end = work.time.monotonic() + work.pace("upload", 25)
        while work.time.monotonic() < end:
            work.time.sleep(0.2)
        work.log("upload_done")


atexit.register(upload)
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
    job = case.start(*case.run())
    case.wait_event("upload")
    everybody = [pid for pid, _ in case.alive()]
    t0 = case.send(signal.SIGINT, *everybody)
    sent = ["INT"]
    for after, number in ((10, signal.SIGTERM), (20, signal.SIGKILL)):
        while time.monotonic() < t0 + after and (job.code is None or case.alive()):
            time.sleep(0.1)
        left = [pid for pid, _ in case.alive()]
        if not left:
            break
        case.send(number, *left)
        sent.append(number.name[3:])
    case.figure("sent " + " ".join(sent))
    case.heard(job, t0)
    code = case.over(job, t0, 19, (130, 0))
    case.check("KILL" not in sent, "an end by itself before LSF's KILL after 20 s", "killed")
    case.told_steps(job, t0, {case.total} | set(case.checkpoints()))
    case.silent_of(job, t0, r"never calls|hindered|\bcrash|HANG|hung|restart \d|[1-9]\d* steps? (?:are |were )?lost", "nobody accused, nothing lost: all steps were done and saved")
    case.check(case.total in case.checkpoints(), f"a whole checkpoint after {case.total} steps", str(case.checkpoints()))
    if code == 0:
        case.agree(("finished",), 0)
    else:
        case.agree(("interrupted",), 130)
    case.pace(upload=0.2)
    case.again()
    case.once()
    case.same_end()


play(__file__, story, total=20)
