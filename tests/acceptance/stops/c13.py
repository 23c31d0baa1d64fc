"""c13 two_nodes_eval: two launchers, run.epochs, TERM to the second node's launcher in the evaluation of epoch 1. See expected.md."""

import signal

from kit import free_port, play

TRAIN = '''
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import resilience_sdk
dist.init_process_group("gloo")
model, optimizer = work.make()
ddp = DistributedDataParallel(model)
loader = work.loader(work.TOTAL // 2)
with resilience_sdk.start_run(state={"model": ddp, "optimizer": optimizer, "data": loader}) as run:
    for epoch in run.epochs(2):
        for step, batch in run.steps(loader):
            work.train(ddp, optimizer, step, int(batch[0]))
        work.log("eval", epoch=epoch)
        ddp.eval()
        work.busy(work.pace("eval", 8))
        ddp.train()
        work.log("eval_done", epoch=epoch)
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.per_epoch = case.total // 2
    case.write("train.py", TRAIN)
    command = case.run("train.py", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "stops13", "--local-addr", "127.0.0.1", ranks=1)
    one = case.start(*command)
    one.wait_line(r"resilience:", 60)
    two = case.beside(*command)
    case.wait_event("eval", count=2, epoch=0, job=one)
    t0 = case.send(signal.SIGTERM, two.pid)
    for name, job in (("first", one), ("second", two)):
        case.heard(job, t0, label=f"{name}: word")
        case.named(job, t0, "TERM")
    for name, job in (("first", one), ("second", two)):
        got = job.wait_end(60)
        case.check(got == 75, f"75 of the {name} launcher", f"{got}: {job.text(t0)[-300:]!r}")
        if got is not None:
            case.figure(f"{name} {got} after {job.ended_at - t0:.1f} s")
            case.check(job.ended_at - t0 < 40, f"the {name} launcher to end in 40 s", f"{job.ended_at - t0:.0f} s")
        case.silent_of(job, t0, r"never calls|does not call|hindered|died|\bcrash|HANG|is gone|goes on alone|[1-9]\d* steps? (?:are |were )?lost", f"nobody accused on the {name} node")
    if case.wait_gone(5, t0) is None:
        case.check(False, "nothing left", str(case.alive()[:4]))
        case.clean()
    n = case.agreed_stop(one, t0)
    case.told_steps(two, t0, {n} | set(case.checkpoints()))
    case.check(n == case.per_epoch, f"a stop between the epochs, after {case.per_epoch} steps", str(n))
    case.check(n in case.checkpoints(), f"a whole checkpoint after {n} steps", str(case.checkpoints()))
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",))
    case.pace(eval=0.3)
    three = case.start(*command)
    three.wait_line(r"resilience:", 60)
    four = case.beside(*command)
    for job in (three, four):
        got = job.wait_end(120)
        case.check(got == 0, "the rerun's launchers to end with 0", f"{got}: {job.text()[-300:]!r}")
        case.figure(f"rerun {got}")
    if case.wait_gone(8, t0) is None:
        case.check(False, "nothing left after the rerun", str(case.alive()[:4]))
    for rank in (0, 1):
        done = [e["epoch"] for e in case.events("eval_done", rank=rank)]
        case.check(done == [0, 1], f"each evaluation done once on rank {rank}", str(done))
    case.once()
    case.same_end()


play(__file__, story, total=40)
