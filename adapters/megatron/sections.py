"""Which of Megatron's timers is which section."""

from __future__ import annotations

STEP = "forward-backward"
OPTIMIZER = "optimizer"
DATA = "batch-generator"

KINDS = {"data": "io", "checkpoint": "io", "finalize": "io", "resume": "io", "comm_wait": "comm"}
_NAMES = {
    "forward-compute": "fwd",
    "backward-compute": "bwd",
    DATA: "data",
    OPTIMIZER: "optim",
    "eval-time": "eval",
    "evaluate": "eval",
    "save-checkpoint": "checkpoint",
    "save-checkpoint-non-persistent": "checkpoint",
    "load-checkpoint": "resume",
}
# Where a rank waits for others: between stages of a pipeline, and for the gradients of its replicas.
_WAITS = (
    "all-grads-sync",
    "conditional-embedder-grads-all-reduce",
    "embedding-grads-all-reduce",
    "layernorm-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
    "params-all-gather",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "forward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)
SECTION_OF = {**_NAMES, **dict.fromkeys(_WAITS, "comm_wait")}
IN_STEP = ("fwd", "bwd", "data", "optim", "comm_wait")
"""Those that are never open between two steps."""
NAMES = (*dict.fromkeys(SECTION_OF.values()), "finalize")
