"""NeMo's recipe of the straggler callback on ranks that wait in their forward: rank 3 for longer, and longer still.

8 % longer from the beginning on; as long as a score of 0.6 means since the file `slower` is in TOLD.
"""

from __future__ import annotations

import time
from pathlib import Path

from lightning_module import Module, loader, pl, told, trainer

from resilience_sdk.adapters.lightning import straggler_det_callback

WAIT_S = 0.1
SLOW_RANK = 3


class Waiting(Module):
    """Waits in the place of work, so that five ranks fit onto two processors."""

    def training_step(self, batch, batch_idx):
        """Wait, then do a little."""
        times = 1.0
        if self.global_rank == SLOW_RANK:
            times = 1 / 0.6 if (Path(told) / "slower").exists() else 1.08
        time.sleep(WAIT_S * times)
        return super().training_step(batch, batch_idx)


folder = Path(told).parent
fitting = trainer(
    straggler_det_callback(straggler_report_time_interval=3),
    pl.callbacks.ModelCheckpoint(folder, save_last=True),
    enable_checkpointing=True,
    strategy="ddp",
    devices=5,
    max_steps=1_000_000,
)
fitting.fit(Waiting(), loader())
