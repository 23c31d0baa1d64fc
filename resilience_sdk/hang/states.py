"""What the analysis is told about a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from resilience_sdk.hang.timers import Timer
    from resilience_sdk.rank_page import OpenSection, RankSnapshot


@attrs.frozen
class CollectivePosition:
    """How far a rank came in one process group; numbers count from 1, 0 means none."""

    enqueued: int
    completed: int
    started: int | None = None
    """None where the backend does not say (gloo)."""
    members: tuple[int, ...] | None = None
    """Global ranks of the group, where the record says; a rank that never used a group does not list it."""
    is_world: bool = False

    @property
    def blocked(self) -> bool:
        """Whether the rank stands in a collective that is not complete.

        One that is enqueued but not started by the device is not stood in: the device is elsewhere.
        """
        return self.completed < self.enqueued and (self.started is None or self.started > self.completed)


@attrs.frozen
class RankState:
    """One rank at one moment, from its page and from /proc."""

    rank: int
    node: str = ""
    alive: bool = True
    process_state: str = "S"
    """As in /proc/<pid>/stat; empty where unknown."""
    traced: bool = False
    reads_terminal: bool = False
    snapshot: RankSnapshot | None = None
    """None where no page can be read: nothing is known then."""
    collectives: Mapping[str, CollectivePosition] | None = None
    """Positions by process group, from a *fresh* flight record; None where unknown."""
    now_ns: int | None = None
    """Reading of the clock that the snapshot's times are of, for a rank of another node; else the judge's."""
    in_collective: bool | None = None
    """Whether the main thread's stack is inside a collective; None where no stack was taken."""
    activity: str | None = None
    """What the stack is known to take long with (`stacks.busy_with`)."""
    cpu_share: float | None = None
    """CPU time over wall time since the last look, of the whole process."""
    role: str = ""
    """Ranks of one role run the same code (pipeline stages do not)."""
    timers: tuple[Timer, ...] | None = None
    """Running deadlines as the rank's own node sees them, which alone has learned them; None: ours apply."""
    silent_s: float | None = None
    """For how long nothing has been heard of the node of this rank, where that is too long; nothing else is known."""
    past: bool | None = None
    """Whether that node finds it past what may reasonably be granted; None where `timers` is."""

    @property
    def running(self) -> bool:
        """Whether the process is there and has not said that it leaves."""
        return self.alive and (self.snapshot is None or self.snapshot.exit_state == "running")

    @property
    def left_cleanly(self) -> bool:
        """Whether the rank has finished its program."""
        return self.snapshot is not None and self.snapshot.exit_state == "clean"

    @property
    def died(self) -> bool:
        """Whether the process ended, or is ending, without having finished its program."""
        return not self.running and not self.left_cleanly

    @property
    def has_signal(self) -> bool:
        """Whether the page shows any progress, or promises some."""
        snapshot = self.snapshot
        return snapshot is not None and bool(snapshot.declared or snapshot.beats or snapshot.main_lane.stack)

    @property
    def stack(self) -> tuple[OpenSection, ...]:
        """Open sections of the lane that beats, outermost first."""
        return self.snapshot.main_lane.stack if self.snapshot is not None else ()

    @property
    def section(self) -> str | None:
        """Name of the innermost open section."""
        return self.stack[-1].name if self.stack else None

    @property
    def is_attended(self) -> bool:
        """Whether a person is at it: a debugger, or a prompt on a terminal."""
        return self.traced or self.reads_terminal or self.activity == "prompt"

    @property
    def stopped(self) -> bool:
        """Whether the process stands still by a signal or a debugger's stop."""
        return self.running and self.process_state in ("T", "t")
