"""Blocks of a process in which faults are planned: they ask whether one is due."""

from __future__ import annotations

from types import TracebackType

from resilience_sdk import faults
from resilience_sdk.lanes.blocks import Beat, Block


class ArmedBlock(Block):
    """A block that asks on entry whether an injected fault is due."""

    __slots__ = ()

    def __enter__(self) -> Block:
        block = super().__enter__()
        faults.reached(self.name, self.lane.current_step(), beat=False)
        return block

    def begin(self, now: int) -> bool:
        """Open the block without a `with`, and suffer the fault inside it."""
        has_begun = super().begin(now)
        if has_begun:
            faults.reached(self.name, self.lane.current_step(), beat=False)
        return has_begun


class ArmedBeat(Beat):
    """A heartbeat that asks on entry and exit whether an injected fault is due."""

    __slots__ = ()

    def __enter__(self) -> Block:
        beat = super().__enter__()
        faults.reached(self.name, self.lane.current_step(), beat=True)
        return beat

    def begin(self, now: int, step: int | None = None) -> bool:
        """Open it without a `with`, and suffer the fault inside it."""
        has_begun = super().begin(now, step)
        if has_begun:
            faults.reached(self.name, self.lane.current_step(), beat=True)
        return has_begun

    def end(self, now: int, less_ns: int = 0) -> None:
        """Close what `begin` opened, and suffer the fault behind it."""
        step, was_open = self.lane.current_step(), self.t0 != 0
        super().end(now, less_ns)
        if was_open:
            faults.left(self.name, step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        step = self.lane.current_step()
        super().__exit__(kind, error, trace)
        if kind is None:
            faults.left(self.name, step)
