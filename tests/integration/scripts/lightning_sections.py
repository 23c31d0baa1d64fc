"""NVIDIA's callback of sections: fits twice in one process, or fails as the argument says.

`twice`: two trainings with saves and evaluations, one after the other. Else the name of a `WorkloadAction`: rank 1
raises in step 6, and the policy asks for that.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from lightning_module import Module, loader, pl, tell, told, trainer

from resilience_sdk.adapters.lightning import FaultToleranceSectionsCallback, WorkloadAction, WorkloadControlRequest
from resilience_sdk.rank import current

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = Path(told).parent
mode = sys.argv[1]


class Failing(Module):
    """Raises on one rank, where that is asked for."""

    def training_step(self, batch: object, batch_idx: int) -> object:
        """Return the loss."""
        if mode != "twice" and rank == ranks - 1 and self.trainer.global_step == 6:
            raise ValueError("bad memory")
        return super().training_step(batch, batch_idx)


def exc_handling_policy(error: Exception) -> WorkloadControlRequest:
    """Ask for what the argument says."""
    return WorkloadControlRequest(WorkloadAction[mode], description=f"policy saw {type(error).__name__}: {error}")


fault_tol_cb = FaultToleranceSectionsCallback(
    autoresume=True,
    calculate_timeouts=True,
    logger_name="test_logger",
    exp_dir=folder,
    exc_handling_policy=exc_handling_policy,
)
for number in (1, 2) if mode == "twice" else (1,):
    checkpoints = pl.callbacks.ModelCheckpoint(folder / f"fit-{number}", every_n_train_steps=4, save_top_k=-1)
    fitting = trainer(
        fault_tol_cb,
        checkpoints,
        enable_checkpointing=True,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        val_check_interval=4,
        max_steps=12 * number,
        **({"strategy": "ddp", "devices": ranks} if ranks > 1 else {}),
    )
    fitting.fit(Failing(), loader(), loader(64))
    patched = [name for name in ("training_step", "save_checkpoint") if name in vars(fitting.strategy)]
    tell(f"fit-{number}-{rank}", step=fitting.global_step, patched=patched)
blocks = [block for lane in current().recorder._lanes.values() for block in lane.blocks.values()]
tell(f"end-{rank}", sections={block.name: block.n for block in blocks if block.kind != "heartbeat"})
