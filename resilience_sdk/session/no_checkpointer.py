"""What a run without checkpoints has in the place of a `Checkpointer`."""

from __future__ import annotations

from typing import Any

from resilience_sdk.checkpoint import GoodCheckpoint


class NoCheckpointer:
    """Stands in where nothing is saved: a run without `state`, or an SDK that is switched off."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.last_good: GoodCheckpoint | None = None
        self.skipped_steps: frozenset[int] = frozenset()

    def resume(self) -> int:
        """Return 0: there is nothing to resume."""
        return 0

    def save(self, step: int) -> bool:
        """Return False: nothing is saved."""
        return False

    def maybe_save(self, step: int) -> bool:
        """Return False: nothing is saved."""
        return False
