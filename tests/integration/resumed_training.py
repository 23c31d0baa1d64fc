"""Trains a small model three times: undisturbed, killed in the middle, and resumed; prints the losses as JSON.

    resumed_training.py ROOT VARIANT...

Ranks are forked from here, so that torch is imported once; each is a process that starts, trains and dies like
one started by a launcher.
"""

import atexit
import json
import os
import random
import signal
import sys
from pathlib import Path

import forked
import numpy
import torch
import torch._dynamo  # optimizers import it when they are made; once here instead of in every rank
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import resilience_sdk

EPOCHS = 3
KILLED_AT = {"plain": 13, "workers": 13, "ddp": 8}


class Noisy:
    """Twenty samples with random augmentation from all three generators."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = random.random() + numpy.random.standard_normal() + torch.rand(4)
        return torch.full((4,), float(index)) + 0.1 * noise.float()


def make_loader(variant):
    if variant == "ddp":
        return DataLoader(Noisy(), batch_size=2, sampler=DistributedSampler(Noisy(), shuffle=True))
    return DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=2 if variant == "workers" else 0)


def train(variant, run_dir, losses, killed_at):
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    random.seed(1)
    numpy.random.seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    if variant == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    loader = make_loader(variant)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    with (
        losses.open("a") as file,
        resilience_sdk.start_run(run_dir, state=state, checkpoint_every=3) as run,
    ):
        for step, batch in run.steps(loader, epochs=EPOCHS):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.values["steps"] = run.values.get("steps", 0) + 1
            file.write(json.dumps([step, run.epoch, loss.item().hex(), run.values["steps"]]) + "\n")
            file.flush()
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)


def rank_main(variant, root, phase, rank, size):
    os.environ.update(RESILIENCE_JOB_ID=f"{variant}-{phase}", RESILIENCE_PAGE_DIR=str(root / "pages"))
    torch.set_num_threads(1)
    if variant == "ddp":
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("gloo", init_method=f"file://{root}/store-{phase}", rank=rank, world_size=size)
    run_dir = root / ("reference" if phase == "reference" else "disturbed")
    train(variant, run_dir, root / f"{phase}-{rank}", KILLED_AT[variant] if phase == "killed" else None)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_phase(variant, root, phase):
    size = 2 if variant == "ddp" else 1
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(variant, root, phase, rank, size)
                code = 0
            except BaseException as error:  # told by the exit code and the line
                print(phase, rank, repr(error), file=sys.stderr)
            finally:
                atexit._run_exitfuncs()  # a forked child skips them otherwise, and has not ended cleanly then
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    lines = [[json.loads(line) for line in (root / f"{phase}-{rank}").read_text().splitlines()] for rank in range(size)]
    is_finished = (root / ("reference" if phase == "reference" else "disturbed") / "finished").exists()
    return {"codes": codes, "lines": lines, "finished": is_finished}


if __name__ == "__main__":
    forked.load_once("resilience_sdk.checkpoint", "resilience_sdk.rank", "resilience_sdk.straggler")
    results = {}
    for wanted in sys.argv[2:]:
        place = Path(sys.argv[1]) / wanted
        (place / "pages").mkdir(mode=0o700, parents=True)
        print(f"variant {wanted}", file=sys.stderr, flush=True)
        results[wanted] = {phase: run_phase(wanted, place, phase) for phase in ("reference", "killed", "resumed")}
    print(json.dumps(results))
