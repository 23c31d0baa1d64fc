"""Checkpoints that are there as a whole or not at all, and the resume from the newest valid one.

In come live objects of all ranks; out come directories `step-N`, each with a manifest that is written last.
`checkpointer` is the face; `policy` decides when to save, `save` in which order, and beside the training where it is
asked for; `capture` takes one rank's part and puts it back, `payload` are its files, `sharded` what is spread over
ranks; `commit` makes it durable, `store` keeps the directory and decides who may write, `manifest` what is valid and
which is chosen. `ranks` is how all of them agree. No module but `payload`, `capture`, `state` and `sharded` loads
torch.
"""

from resilience_sdk.checkpoint.checkpointer import Checkpointer
from resilience_sdk.checkpoint.save import GoodCheckpoint

__all__ = ["Checkpointer", "GoodCheckpoint"]
