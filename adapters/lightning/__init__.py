"""Lightning: callbacks for `lightning.pytorch` and `pytorch_lightning` alike.

    from resilience_sdk.adapters.lightning import ResilienceCallback

    trainer = Trainer(callbacks=[ResilienceCallback(run_dir="runs/a")])
    trainer.fit(model)  # resumes by itself

Neither package is imported before the first callback is made. The other callbacks have the names and parameters of
NVIDIA's extension and of NeMo, so that a script changes an import.
"""

from resilience_sdk.adapters.lightning.callback import ResilienceCallback, callbacks_from_environment
from resilience_sdk.adapters.lightning.drop_in import (
    FaultToleranceCallback,
    PreemptionCallback,
    SimulatedFaultParams,
    StragglerDetectionCallback,
    straggler_det_callback,
)

__all__ = [
    "FaultToleranceCallback",
    "PreemptionCallback",
    "ResilienceCallback",
    "SimulatedFaultParams",
    "StragglerDetectionCallback",
    "callbacks_from_environment",
    "straggler_det_callback",
]
