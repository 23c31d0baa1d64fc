"""The heartbeats of NVRx's client in a DDP loop, as its guide has them: timeouts calculated, kept, and counted from.

The first attempt of a job hangs where HANG says `STEP:RANK`.
"""

import json
import os
import time
from pathlib import Path

import nvidia_resiliency_ext.fault_tolerance as fault_tolerance
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "20"))
TOLD = Path(os.environ["TOLD"])
STATE = TOLD / "ft_state.json"


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    client = fault_tolerance.RankMonitorClient()
    if STATE.exists():
        client.load_state_dict(json.loads(STATE.read_text()))
    client.init_workload_monitoring()
    began = str(client.hb_timeouts)
    at, _, who = os.environ.get("HANG", "").partition(":")
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(STEPS):
        if is_first and at == str(step) and who in (str(rank), "all"):
            print(f"rank {rank} hangs at step {step}", flush=True)
            time.sleep(3600)
        loss = model(torch.ones(8, 4)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        client.send_heartbeat()
        time.sleep(0.02)
    client.calculate_and_set_hb_timeouts(skip_if_not_ready=False)
    if rank == 0:
        STATE.write_text(json.dumps(client.state_dict()))
    told = {"began": began, "timeouts": vars(client.hb_timeouts), "state": client.state_dict()}
    (TOLD / f"heartbeats-{rank}").write_text(json.dumps(told))
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
