"""The sections of NVRx's client in a DDP loop, as its guide has them: nested, timed, and with a deadline each.

The first attempt of a job hangs where HANG says: in `forward`, in `step` around it, in `checkpointing`, or
`outside` of any.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from torch.nn.parallel import DistributedDataParallel

TOLD = Path(os.environ["TOLD"])
STATE = TOLD / "ft_sections.json"


def maybe_hang(rank, where):
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if rank == 1 and is_first and os.environ.get("HANG") == where:
        print(f"rank {rank} hangs: {where}", flush=True)
        time.sleep(3600)


def main():
    client = RankMonitorClient()
    client.init_workload_monitoring()
    if STATE.exists():
        client.load_state_dict(json.loads(STATE.read_text()))
    began = {"section": client.section_timeouts.section, "out_of_section": client.section_timeouts.out_of_section}
    client.start_section("setup")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    client.end_section("setup")
    for step in range(12):
        if step == 6:
            maybe_hang(rank, "outside")
        client.start_section("step")
        client.start_section("forward")
        loss = model(torch.ones(8, 4)).sum()
        if step == 6:
            maybe_hang(rank, "forward")
        client.end_section("forward")
        if step == 6:
            maybe_hang(rank, "step")
        loss.backward()
        optimizer.step()
        client.end_section("step")
        if step % 4 == 3:
            client.start_section("checkpointing")
            if step == 7:
                maybe_hang(rank, "checkpointing")
            time.sleep(0.1)
            client.end_all_sections()
        time.sleep(0.01)
    client.calculate_and_set_section_timeouts(selected_sections=["step", "checkpointing"], calc_out_of_section=True)
    if rank == 0:
        STATE.write_text(json.dumps(client.state_dict()))
    told = {"began": began, "state": client.state_dict()}
    (TOLD / f"sections-{rank}").write_text(json.dumps(told))
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
