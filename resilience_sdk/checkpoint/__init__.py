"""Checkpoints that are there as a whole or not at all, and the resume from the newest valid one.

In come live objects of all ranks; out come directories `step-N`, each with a manifest that is written last.
`checkpointer` is the face; `policy` decides when to save, `save` in which order, `capture` and `payload` hold one
rank's part, `sharded` what is spread over ranks, `async_save` a save beside the training; `commit` makes it durable,
`store` keeps the directory, `manifest` decides what is valid and which is chosen, `restore` reads it back;
`writer_lease` decides who may write. `ranks` is how all of them agree. No module but `payload`, `capture`, `restore`,
`state` and `sharded` loads torch.
"""

from resilience_sdk.checkpoint.checkpointer import Checkpointer
from resilience_sdk.checkpoint.save import GoodCheckpoint

__all__ = ["Checkpointer", "GoodCheckpoint"]
