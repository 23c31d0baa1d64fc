"""c05 port_wait: the launcher waits between attempts for a port that somebody holds; TERM. See expected.md."""

import signal
import socket

from kit import play

TRAIN = '''
import os
import work
work.log("up")
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
# a store of its own at a hard-coded port, as many a script has for its metrics or its own messages
side = dist.TCPStore("127.0.0.1", PORT, is_master=True, wait_for_workers=False) if work.rank() == 0 else None
dist.init_process_group("gloo")
model, optimizer = work.make()
ddp = DistributedDataParallel(model)
for step in range(work.TOTAL):
    work.train(ddp, optimizer, step)
work.finish(model, work.TOTAL)
dist.destroy_process_group()
'''


def story(case):
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.listen(16)
    port = holder.getsockname()[1]
    case.write("train.py", TRAIN.replace("PORT", str(port)))
    job = case.start(*case.run())
    _, text = job.wait_line(r"(?=.*(port|in use|EADDRINUSE|address))(?=.*(wait|tr(y|ies|ied)|until|free))", 150)
    case.note(f"- it waits: {text}")
    ups = len(case.events("up", launch=1))
    t0 = case.send(signal.SIGTERM, job.pid)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.over(job, t0, 10, 75)
    case.check(len(case.events("up", launch=1)) == ups, "no further attempt after the signal", f"{len(case.events('up', launch=1)) - ups} more ranks")
    case.silent_of(job, 0.0, r"restart \d+ of \d+", "no restart counted for a port in use")
    case.silent_of(job, t0, r"never calls|hindered|[1-9]\d* steps? (?:are |were )?lost|hardware", "nothing false told")
    case.told_steps(job, t0, {0})
    case.agree(("preempted",), 75)
    holder.close()
    case.again()
    case.check(case.first_step(2) == 0, "the rerun from step 0", str(case.first_step(2)))
    case.once()
    case.same_end()


play(__file__, story, total=20, limit=330)
