"""Gloo ranks of which rank 1 raises, in the way that is asked for: `raising.py HOW`.

`main`: in its loop; `record`: the same below torch's own `@record`; `worker`: in a DataLoader worker; `thread`: in
a thread, after which the rank ends by a code of its own.
"""

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset

from resilience_sdk import heartbeat

how, rank = sys.argv[1], int(os.environ["RANK"])


class Samples(Dataset):
    """Sixteen numbers, of which rank 1 cannot read one."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if how == "worker" and rank == 1 and index == 6:
            raise ValueError(f"sample {index} has a negative length")
        return torch.ones(1) * index


def background():
    raise ValueError("the background thread has lost its queue")


def train():
    for step, batch in enumerate(DataLoader(Samples(), batch_size=2, num_workers=1 if how == "worker" else 0)):
        with heartbeat(step=step):
            if rank == 1 and step == 3:
                if how == "thread":
                    threading.Thread(target=background).start()
                    sys.exit(9)
                if how != "worker":
                    raise ValueError(f"step {step} does not like this batch")
            dist.all_reduce(batch.sum())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


(record(main) if how == "record" else main)()
