"""NVIDIA's straggler callback, as its documentation makes it, on ranks with kernels; those of rank 1 become slow.

They do since the file `slower` is in TOLD. The thresholds are below what chance makes of scores on a busy machine.
A CPU has no kernels: operators stand in for them. The profiler, its windows and all that is made of them are real.
With the argument `cuda` one rank has a GPU, and nothing stands in for anything.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning_module import Module, loader, pl, told, trainer

from resilience_sdk.adapters.lightning import StragglerDetectionCallback
from resilience_sdk.straggler import attachment

on_cuda = sys.argv[1:] == ["cuda"]
if not on_cuda:
    attachment.sampled_device = lambda _model: "CPU"


class Multiplying(Module):
    """Multiplies matrices, larger ones on rank 1."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        size = 1024 if self.global_rank == 1 and (Path(told) / "slower").exists() else 128
        for _ in range(4):
            torch.mm(*torch.ones(2, size, size, device=self.device))
        return super().training_step(batch, batch_idx)


folder = Path(told).parent
straggler_cb_args = dict(
    report_time_interval=4.0,
    calc_relative_gpu_perf=True,
    calc_individual_gpu_perf=True,
    num_gpu_perf_scores_to_log=3,
    gpu_relative_perf_threshold=0.2,
    gpu_individual_perf_threshold=0.01,
    stop_if_detected=not on_cuda,
    enable_ptl_logging=True,
    logger_name="test_logger",
)
fitting = trainer(
    StragglerDetectionCallback(**straggler_cb_args),
    pl.callbacks.ModelCheckpoint(folder, save_last=True),
    enable_checkpointing=True,
    logger=pl.loggers.CSVLogger(folder, "", version="scores"),
    **({"accelerator": "gpu"} if on_cuda else {"strategy": "ddp", "devices": 2}),
    max_steps=1_000_000,
)
fitting.fit(Multiplying(), loader())
