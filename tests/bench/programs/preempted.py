"""A small training of two DDP ranks that says what it is doing, so that it can be preempted at any moment of it.

preempted.py FOLDER STEPS

Every loss goes to FOLDER/losses-RANK, the final weights to FOLDER/weights-RANK. Signs of this start are files
`START.ATTEMPT-NAME-RANK` in the directory TOLD, where START is a variable of the environment; where it is not set,
nobody disturbs this run, and it neither saves nor dawdles.
"""

import hashlib
import io
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

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
told, rank, start = Path(os.environ["TOLD"]), int(os.environ["RANK"]), os.environ.get("START")


def tell(name, value):
    sign = f"{start}.{os.environ['TORCHELASTIC_RESTART_COUNT']}-{name}-{rank}"
    (told / f".{sign}").write_text(str(value))
    (told / f".{sign}").replace(told / sign)


class Noisy:
    """Items with random augmentation from the generators of a worker."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full((8,), index / 96.0) + 0.1 * torch.rand(8) + 0.01 * random.random()


class Telling:
    """State that says when it is saved, and takes its time."""

    def state_dict(self):
        run = resilience_sdk.current_run()
        if run.step:  # before, it is only looked at
            tell("last-save" if run.preempted else "save", run.step)
            time.sleep(0.03)
        return {}

    def load_state_dict(self, state):
        pass


def evaluate(model):
    tell("evaluation", 0)
    model.eval()
    with torch.no_grad():
        model(torch.ones(8, 8))
    time.sleep(0.15)
    model.train()


tell("rank", os.getpid())
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(rank)
random.seed(rank)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Noisy(), batch_size=3, sampler=DistributedSampler(Noisy(), shuffle=True), num_workers=1)
state = {"model": model, "optimizer": optimizer, "ballast": torch.zeros(2_000_000), "telling": Telling()}
is_disturbed = start is not None
options = {"checkpoint_every": 5, "checkpoint_async": int(start) % 2 == 1} if is_disturbed else {}
with (
    (folder / f"losses-{rank}").open("a", buffering=1) as losses,
    resilience_sdk.start_run(state=state if is_disturbed else None, **options) as run,
):
    first = run.step
    for step, batch in run.steps(loader, epochs=steps, max_steps=steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.write(f"{step} {loss.item().hex()}\n")
        if is_disturbed:
            tell(f"step-{step - first}", time.monotonic())
            time.sleep(0.01)
            if step % 8 == 3 and rank == 0:
                evaluate(net)
# As numbers, since pickles of equal states may differ.
content = io.BytesIO()
for tensor in [*net.state_dict().values(), *(item for one in optimizer.state.values() for item in one.values())]:
    content.write(tensor.numpy().tobytes())
(folder / f"weights-{rank}").write_text(hashlib.sha256(content.getvalue()).hexdigest())
dist.destroy_process_group()
