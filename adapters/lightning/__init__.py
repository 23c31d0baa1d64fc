"""Lightning: callbacks for `lightning.pytorch` and `pytorch_lightning` alike.

    from resilience_sdk.adapters.lightning import ResilienceCallback

    trainer = Trainer(callbacks=[ResilienceCallback(run_dir="runs/a")])
    trainer.fit(model)  # resumes by itself

Neither package is imported before the first callback is made. The other callbacks have the names and parameters of
NVIDIA's extension and of NeMo, so that a script changes an import.
"""

from resilience_sdk.adapters.lightning.callback import ResilienceCallback, callbacks_from_environment
from resilience_sdk.adapters.lightning.drop_in import (
    PreemptionCallback,
    StragglerDetectionCallback,
    straggler_det_callback,
)
from resilience_sdk.adapters.lightning.fault_tolerance import (
    FaultToleranceCallback,
    FaultToleranceSectionsCallback,
    SimulatedFaultParams,
)
from resilience_sdk.adapters.nvrx.client import WorkloadAction, WorkloadControlRequest

__all__ = [
    "FaultToleranceCallback",
    "FaultToleranceSectionsCallback",
    "PreemptionCallback",
    "ResilienceCallback",
    "SimulatedFaultParams",
    "StragglerDetectionCallback",
    "WorkloadAction",
    "WorkloadControlRequest",
    "callbacks_from_environment",
    "straggler_det_callback",
]
