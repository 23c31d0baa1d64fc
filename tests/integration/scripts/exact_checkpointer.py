"""A loop of one's own with a `Checkpointer`: `exact_checkpointer.py OUT [RUN_DIR [KILLED_AT]]`; without RUN_DIR alone.

Three epochs of ten batches in an order that the loader draws from the process's generator, a dropout, gradients of
three batches added up by hand, a replay memory and statistics of numpy. Each step leaves a line that tells all of it.
"""

import collections
import hashlib
import os
import signal
import sys

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk.checkpoint import Checkpointer


class Augmented(Dataset):
    """Numbers, to which each reading adds another one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


out, killed_at = sys.argv[1], int(sys.argv[3]) if len(sys.argv) > 3 else None
torch.set_printoptions(precision=17, threshold=1 << 20)  # to the last bit
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = StatefulDataLoader(Augmented(), batch_size=2, sampler=RandomSampler(range(20)))
replay: collections.deque = collections.deque(maxlen=5)
seen = numpy.zeros(20)
state = {"model": model, "optimizer": optimizer, "replay": replay, "seen": seen}
saver = None
step = first_epoch = 0
if len(sys.argv) > 2:
    saver = Checkpointer(state, run_dir=sys.argv[2], every=4)
    saver.add_data("loader", loader)
    step = saver.resume()
    first_epoch = saver.values.get("epoch", 0)
for epoch in range(first_epoch, 3):
    if saver is not None:
        saver.values["epoch"] = epoch
    for batch in loader:
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(batch[:, None]).square().mean()
        loss.backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        replay.append((step, batch.numpy(), loss.detach()))
        seen[batch.long().numpy()] += 1
        content = repr((batch, loss, list(model.parameters()), replay, seen))
        with open(out, "a") as file:
            print(step, hashlib.sha1(content.encode()).hexdigest(), file=file)
        step += 1
        if saver is not None:
            saver.maybe_save(step)
    torch.rand(3)  # an evaluation
