"""NaN, infinity and spikes of the loss and the gradient norm, found without waiting for the device.

    numerics.check(loss=loss, grad_norm=norm)      # once per optimizer step, by every rank

`spikes` is the rule, `reading` brings the values to the host, `trouble` says whose fault it looks like, `recording`
writes the incident, and `watching` is what the training calls.
"""

from resilience_sdk.numerics.trouble import Trouble
from resilience_sdk.numerics.watching import check, settle

__all__ = ["Trouble", "check", "settle"]
