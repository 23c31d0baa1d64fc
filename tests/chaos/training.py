"""A small training of DDP ranks with everything that must be resumed exactly; each step is told as it is done.

training.py FOLDER STEPS [NAMESPACE ADDRESS]

Losses go to FOLDER/losses-RANK, a hash of the final weights to FOLDER/weights-RANK, and the attempt, pid and step of
the newest step to FOLDER/step-RANK. A rank does not pass the step S of a FOLDER/due-RANK-ATTEMPT-S before that file is
gone: who strikes from outside may be late. With a network namespace rank 1 moves there, and ADDRESS is that of the
others.
"""

import ctypes
import hashlib
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import resilience_sdk
from resilience_sdk import numerics, straggler

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]


class Noisy:
    """Items with random augmentation from two generators."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((8,), index / 48.0) + 0.1 * torch.rand(8) + 0.01 * random.random()


def tell(step):
    """Say that a step is done, whole or not at all; wait there for whoever is to strike and has not."""
    (folder / f".step-{rank}").write_text(f"{attempt} {os.getpid()} {step}")
    (folder / f".step-{rank}").replace(folder / f"step-{rank}")
    while any(int(path.name.split("-")[3]) <= step for path in folder.glob(f"due-{rank}-{attempt}-*")):
        time.sleep(0.005)


if sys.argv[3:]:
    namespace, os.environ["MASTER_ADDR"] = sys.argv[3:]
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    if rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{namespace}") as file:
            if libc.setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), "setns")
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(rank)
random.seed(rank)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Noisy(), batch_size=3, sampler=DistributedSampler(Noisy(), shuffle=True))
straggler.attach(model, optimizer)
state = {"model": model, "optimizer": optimizer}
with (
    (folder / f"losses-{rank}").open("a", buffering=1) as losses,
    resilience_sdk.start_run(state=state, checkpoint_every=5, checkpoint_async=True) as run,
):
    for step, batch in run.steps(loader, epochs=steps, max_steps=steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        numerics.check(loss=loss, policy="raise")  # the batch is trained again: `rollback` would leave it out
        loss.backward()
        optimizer.step()
        losses.write(f"{step} {loss.item().hex()}\n")
        tell(step)
        time.sleep(0.02)  # as long as a step of a small model takes, so that a fault can come in the middle of a run
digest = hashlib.sha256()
for tensor in [*net.state_dict().values(), *(item for one in optimizer.state.values() for item in one.values())]:
    digest.update(tensor.numpy().tobytes())
(folder / f"weights-{rank}").write_text(digest.hexdigest())
dist.destroy_process_group()
