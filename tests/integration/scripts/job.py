"""A rank that does as its arguments say: `job.py ACTION [only in attempt 0]`. No torch where none is needed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

action = sys.argv[1]
rank = int(os.environ["RANK"])
attempt = int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
out = Path(os.environ["PROBE_OUT"])


def tell(name: str, value: object) -> None:
    path = out / f"{name}-{attempt}-{rank}"
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").replace(path)


def gloo_steps(fault) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(6):
        dist.all_reduce(torch.ones(2))
        tell("step", {"step": step, "t": time.monotonic()})
        if step == 3 and rank == 1:
            fault()
    dist.destroy_process_group()


def kill_in_first_attempt() -> None:
    if attempt == 0:
        tell("killed", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)


def raise_always() -> None:
    raise ValueError("the same thing again")


tell("pid", os.getpid())
if action == "finish":
    sys.stdout.write(f"hello from {rank}\n")  # in one write, as no `print` is under -u
    print(f"problem of {rank}", file=sys.stderr)
elif action == "kill":
    gloo_steps(kill_in_first_attempt)
elif action == "raise":
    gloo_steps(raise_always)
elif action == "exit":
    if rank == 1:
        sys.exit(int(sys.argv[2]))
    time.sleep(30)
elif action == "stay":
    # A child in the rank's session, like a DataLoader worker; both ignore SIGTERM when told to.
    if sys.argv[2:] == ["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)"]
    )
    tell("child", child.pid)
    time.sleep(60)
elif action == "save":
    leaving = []
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
    tell("ready", 1)
    while not leaving:
        time.sleep(0.01)
    tell("saved", 1)
    sys.exit(75)
elif action == "hang":
    from resilience_sdk import heartbeat

    for step in range(5):
        with heartbeat():
            if attempt == 0 and step == 3 and rank == 1:
                time.sleep(3600)
            time.sleep(0.01)
    while attempt == 0:
        time.sleep(0.01)
        heartbeat.beat()
