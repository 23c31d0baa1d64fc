"""A script of NeMo's kind: its recipe of the straggler callback, a rehearsed fault, another signal; two ranks.

The arguments are the delay of the fault in seconds, and `stops` where a straggler that is sure stops the job.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from lightning_module import Module, loader, pl, told, trainer

from resilience_sdk.adapters.lightning import (
    FaultToleranceCallback,
    PreemptionCallback,
    SimulatedFaultParams,
    straggler_det_callback,
)

folder = Path(told).parent
fitting = trainer(
    FaultToleranceCallback(
        autoresume=True,
        calculate_timeouts=True,
        simulated_fault_params=SimulatedFaultParams("rank_killed", base_delay=float(sys.argv[1]), rank_to_fail=1),
        exp_dir=folder,
    ),
    pl.callbacks.ModelCheckpoint(folder, save_last=True),
    enable_checkpointing=True,
    logger=pl.loggers.CSVLogger(folder, "", version=os.environ["RESILIENCE_INTERNAL_ATTEMPT"]),
    strategy="ddp",
    devices=2,
    max_steps=1_000_000,
)
fitting.callbacks.append(
    straggler_det_callback(straggler_report_time_interval=2, stop_if_detected_straggler="stops" in sys.argv)
)
fitting.callbacks.append(PreemptionCallback(sig=signal.SIGUSR1))
fitting.fit(Module(), loader(), ckpt_path="last")
