"""A training whose curves go to Weights & Biases and TensorBoard; its first attempt is killed after its fifth step."""

import json
import os
import signal
from pathlib import Path

import torch
import wandb
from torch.utils.tensorboard import SummaryWriter

from resilience_sdk import start_run
from resilience_sdk.checkpoint.capture import tensorboard_dir

told = Path(os.environ["TOLD"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
weight = torch.zeros(1)
with start_run(state={"weight": weight}, checkpoint_every=3) as run:
    tracker = wandb.init(project="curves", dir=told)
    writer = SummaryWriter(tensorboard_dir(run.session.run_dir.path), purge_step=run.step)
    (told / f"begins-{attempt}").write_text(json.dumps({"id": tracker.id, "step": run.step}))
    for step, _ in run.steps(range(8)):
        weight += 1
        tracker.log({"weight": weight.item()}, step=step)
        # What only the killed attempt says of a step must not be in the curve in the end.
        writer.add_scalar("weight", weight.item() + (100 if attempt == 0 and step >= 3 else 0), step)
        writer.flush()
        if attempt == 0 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
    tracker.finish()
    writer.close()
