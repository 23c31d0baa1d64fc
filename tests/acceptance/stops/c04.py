"""c04 preflight_pid1: `docker stop` of `resilience run --preflight` as PID 1 while it looks at the node. See expected.md."""

import os
import signal
import time

from kit import Wrong, play

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


def child_of(pid):
    """Return the first child of a process: the PID 1 of the namespace."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            found = file.read().split()
    except OSError:
        return None
    return int(found[0]) if found else None


def story(case):
    case.write("train.py", TRAIN)
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.getuid():
        unshare.insert(1, "-Ur")
    job = case.start(*unshare, *case.run("train.py", "--preflight"))
    # The moment: PID 1 has a child (the launcher), and that one has children of its own (the looks), or the first word is there.
    end = time.monotonic() + 60
    init, phase = None, ""
    while time.monotonic() < end and not phase:
        init = child_of(job.pid)
        launcher = init and child_of(init)
        if launcher and child_of(launcher) and job.product_lines():
            phase = "preflight"
        if case.events("up"):
            phase = "ranks"
        if job.code is not None:
            raise Wrong("a preflight that looks", f"the end with {job.code}: {job.text()[-300:]!r}")
        time.sleep(0.005)
    if not init or not phase:
        raise Wrong("a launcher with children under PID 1", "none in 60 s")
    case.figure(f"struck in {phase}")
    t0 = case.send(signal.SIGTERM, init)
    while job.code is None and time.monotonic() < t0 + 10:
        time.sleep(0.05)
    killed = job.code is None
    if killed:
        case.send(signal.SIGKILL, init)
    case.heard(job, t0)
    case.named(job, t0, "TERM")
    case.check(not killed, "an end by itself before docker's KILL after 10 s", "it had to be killed")
    case.over(job, t0, 10, 75)
    case.check(not case.steps(0, 1), "no step", str(case.steps(0, 1)[:3]))
    case.check(phase == "ranks" or not case.events("up", launch=1), "no rank started after the signal", "a rank was started")
    case.silent_of(job, t0, r"\bcrash|died|never calls|hindered|restart \d|[1-9]\d* steps? (?:are |were )?lost|preflight (?:has )?failed|hardware", "no fault of node or rank told")
    case.agree(("preempted",), 75)
    case.again()
    case.once()
    case.same_end()


play(__file__, story, total=20)
