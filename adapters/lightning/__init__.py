"""Lightning: callbacks for `lightning.pytorch` and `pytorch_lightning` alike.

    from resilience_sdk.adapters.lightning import ResilienceCallback

    trainer = Trainer(callbacks=[ResilienceCallback(run_dir="runs/a")])
    trainer.fit(model)  # resumes by itself

Neither package is imported before the first callback is made. The other callbacks have the names and parameters of
NVIDIA's extension and of NeMo, so that a script changes an import.
"""

from resilience_sdk.adapters.lightning.automatic import callbacks_from_environment
from resilience_sdk.adapters.lightning.callback import ResilienceCallback
from resilience_sdk.adapters.lightning.drop_in import (
    FaultToleranceCallback,
    PreemptionCallback,
    StragglerDetectionCallback,
    straggler_det_callback,
)
from resilience_sdk.adapters.lightning.simulated_fault import SimulatedFaultParams

__all__ = [
    "FaultToleranceCallback",
    "PreemptionCallback",
    "ResilienceCallback",
    "SimulatedFaultParams",
    "StragglerDetectionCallback",
    "callbacks_from_environment",
    "straggler_det_callback",
]
