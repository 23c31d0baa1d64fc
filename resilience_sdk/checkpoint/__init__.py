"""Checkpoints that are there as a whole or not at all, and the resume from the newest valid one."""

from resilience_sdk.checkpoint.checkpointer import Checkpointer
from resilience_sdk.checkpoint.saver import GoodCheckpoint

__all__ = ["Checkpointer", "GoodCheckpoint"]
