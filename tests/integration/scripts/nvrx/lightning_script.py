"""NVRx's callbacks of Lightning, as its guide has them: that of heartbeats, or, with SECTIONS, that of sections."""

import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from nvidia_resiliency_ext.ptl_resiliency import (
    FaultToleranceCallback,
    FaultToleranceSectionsCallback,
    StragglerDetectionCallback,
)
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    kind = FaultToleranceSectionsCallback if os.environ.get("SECTIONS") else FaultToleranceCallback
    fault_tolerance = kind(autoresume=True, calculate_timeouts=True, exp_dir=os.environ["TOLD"])
    stragglers = StragglerDetectionCallback(
        report_time_interval=300,
        calc_relative_gpu_perf=True,
        calc_individual_gpu_perf=True,
        num_gpu_perf_scores_to_print=5,
        gpu_relative_perf_threshold=0.7,
        gpu_individual_perf_threshold=0.7,
        stop_if_detected=False,
        enable_ptl_logging=False,
    )
    trainer = pl.Trainer(
        max_steps=8,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[fault_tolerance, stragglers],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=2))
    Path(os.environ["TOLD"], f"lightning-{trainer.global_rank}").write_text(str(trainer.global_step))


if __name__ == "__main__":
    main()
