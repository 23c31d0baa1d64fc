"""Trains with `ResilienceCallback` on the ranks that it is started with, up to the step of the first argument."""

from __future__ import annotations

import os
import sys

from lightning_module import Module, digest, loader, tell, torch, trainer

from resilience_sdk.adapters.lightning import ResilienceCallback

ranks = int(os.environ.get("DEVICES") or os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("LOCAL_RANK", "0"))
torch.manual_seed(100 + rank)
module = Module()
options = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
is_alone = "LIGHTNING_ALONE" in os.environ  # for comparison
fitting = trainer(
    *([] if is_alone else [ResilienceCallback(os.environ["RESILIENCE_RUN_DIR"], checkpoint_every=100_000)]),
    max_steps=int(sys.argv[1]),
    use_distributed_sampler=False,
    **options,
)
fitting.fit(module, loader())
tell(f"end-{rank}", step=fitting.global_step, digest=digest(module))
