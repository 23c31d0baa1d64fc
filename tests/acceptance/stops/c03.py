"""c03 rendezvous_alone: two nodes, the second never comes, TERM to the one that waits. See expected.md."""

import signal

from kit import free_port, play

TRAIN = '''
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model, optimizer = work.make()
ddp = DistributedDataParallel(model)
for step in range(work.TOTAL):
    work.train(ddp, optimizer, step)
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    case.write("train.py", TRAIN)
    port = free_port()
    command = case.run("train.py", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "stops03", "--local-addr", "127.0.0.1", ranks=1)
    job = case.start(*command)
    _, text = job.wait_line(r"\bwait", 90)
    case.note(f"- it waits: {text}")
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.over(job, t0, 15, 75)
    case.check(not case.events("up"), "no rank started", str(len(case.events("up"))))
    case.silent_of(job, t0, r"\bcrash|died|unknown|never calls|hindered|is gone|timed? ?out|[1-9]\d* steps? (?:are |were )?lost", "no fault told")
    case.agree(("preempted",), 75)
    case.only_incidents(("preemption",))
    # the same command, and this time the other node comes
    one = case.start(*command)
    one.wait_line(r"resilience:", 60)
    two = case.beside(*command)
    for name, each in (("first", one), ("second", two)):
        got = each.wait_end(120)
        case.check(got == 0, f"the rerun's {name} launcher to end with 0", f"{got}: {each.text()[-300:]!r}")
        case.figure(f"rerun {got}")
    if case.wait_gone(8, one.began_at) is None:
        case.check(False, "nothing left", str(case.alive()[:4]))
    case.once()
    case.same_end()


play(__file__, story, total=20)
