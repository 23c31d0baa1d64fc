"""Numerics: NaN, infinity and spikes of the loss and the gradient norm, found without waiting for the device.

In come values of a step, on the thread that trains; out come incidents and, if so set, the end of the attempt. `watch`
decides what follows, `anomaly` what counts as bad and whose fault it is, `deferred_read` when a value is read,
`recording` that one episode is one incident.
"""

from resilience_sdk.numerics.anomaly import Trouble
from resilience_sdk.numerics.watch import check, settle

__all__ = ["Trouble", "check", "settle"]
