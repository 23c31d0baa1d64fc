"""c11 torchrun_last_step: plain torchrun and start_run, TERM to rank 0 alone in the last step. See expected.md."""

import signal

from kit import Wrong, play

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
        if step == work.TOTAL - 1:
            work.log("last")
            work.busy(4)
        work.train(ddp, optimizer, step, int(batch[0]))
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    command = case.torchrun("train.py")
    options = {"env": {"RESILIENCE_RUN_DIR": str(case.run_dir)}}
    job = case.start(*command, **options)
    case.wait_event("last", count=2)
    rank = case.rank_pids()
    if 0 not in rank:
        raise Wrong("rank 0 to live", str(rank))
    t0 = case.send(signal.SIGTERM, rank[0])
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    code = case.over(job, t0, 30, (0, 1), gone=6)
    case.check(case.steps(0, 1) == case.steps(1, 1) == list(range(case.total)), "all steps made by both ranks", f"{case.steps(0, 1)[-2:]} {case.steps(1, 1)[-2:]}")
    case.told_steps(job, t0, {case.total} | set(case.checkpoints()))
    case.silent_of(job, t0, r"never calls|hindered|died|\bcrash|HANG|[1-9]\d* steps? (?:are |were )?lost", "nobody accused, nothing lost")
    case.check(case.total in case.checkpoints(), f"a whole checkpoint after {case.total} steps", str(case.checkpoints()))
    case.figure("variant: finished" if code == 0 else "variant: stopped")
    if code == 0:
        case.agree(("finished",), 0)
    else:
        case.agree(("preempted",), 75)
        case.only_incidents(("preemption",))
    case.again(command, **options)
    case.once()
    case.same_end()


play(__file__, story, total=20)
