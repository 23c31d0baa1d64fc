"""Trains on two ranks to step 20: the first save fails on rank 0, and in the first attempt rank 1 raises in step 12."""

from __future__ import annotations

import errno
import os

from lightning_module import Module, loader, pl, tell, trainer

from resilience_sdk.adapters.lightning import ResilienceCallback

rank = int(os.environ["RANK"])
is_first = os.environ["RESILIENCE_INTERNAL_ATTEMPT"] == "0"


class FullDisk(pl.plugins.io.TorchCheckpointIO):
    """Has no space the first time; only rank 0 is asked."""

    has_failed = not is_first

    def save_checkpoint(self, *args: object, **options: object) -> None:
        """Save, but for the first time."""
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().save_checkpoint(*args, **options)


class Buggy(Module):
    """Raises on one of the ranks."""

    def training_step(self, batch: object, batch_idx: int) -> object:
        """Return the loss."""
        if is_first and rank == 1 and self.trainer.global_step == 12:
            raise ValueError("only here")
        return super().training_step(batch, batch_idx)


fitting = trainer(ResilienceCallback(checkpoint_every=5), max_steps=20, strategy="ddp", devices=2, plugins=[FullDisk()])
fitting.fit(Buggy(), loader())
tell(f"end-{rank}", step=fitting.global_step)
