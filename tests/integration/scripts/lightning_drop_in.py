"""A script of NVIDIA's extension and NeMo whose import alone is another one; trains to the step of the argument."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lightning_module import Module, loader, pl, tell, told, trainer

from resilience_sdk.adapters.lightning import (
    FaultToleranceCallback,
    PreemptionCallback,
    StragglerDetectionCallback,
)

exp_dir = Path(told).parent / "exp"
fault_tol_cb = FaultToleranceCallback(
    autoresume=True,
    calculate_timeouts=True,
    logger_name="test_logger",
    exp_dir=exp_dir,
)
straggler_cb = StragglerDetectionCallback(
    report_time_interval=2,
    calc_relative_gpu_perf=True,
    calc_individual_gpu_perf=True,
    num_gpu_perf_scores_to_log=5,
    gpu_relative_perf_threshold=0.7,
    gpu_individual_perf_threshold=0.7,
    stop_if_detected=False,
    logger_name="test_logger",
)
fitting = trainer(
    fault_tol_cb,
    straggler_cb,
    pl.callbacks.ModelCheckpoint(exp_dir, save_last=True),
    enable_checkpointing=True,
    max_steps=int(sys.argv[1]),
    strategy="ddp",
    devices=2,
)
fitting.callbacks.append(PreemptionCallback())
fitting.fit(Module(), loader(), ckpt_path="last")
tell(f"end-{os.environ['RANK']}", step=fitting.global_step)
