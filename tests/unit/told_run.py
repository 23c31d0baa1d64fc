"""A run directory with a journal that tests write into, and the place that sinks of it have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from hypothesis import strategies as st

from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.telemetry.sinks import base
from resilience_sdk.telemetry.tail import Follower, Line, Live, ReadMark

HOST = "here"
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800\n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=3,
)
_KEYS = ("attempt", "step", "job", "rank", "exit_code", "signal", "recovery_s", "lost_steps", "seconds", "stall_s")
_KEYS += (
    "bytes",
    "what",
    "ok",
    "scores",
    "ranks",
    "kind",
    "found",
    "source",
    "verdict",
    "ended_by",
    "exit_codes",
    "id",
)
# Whatever a journal may hold, a little more often what is understood.
EVENTS = st.builds(
    lambda name, t, fields: {**fields, "event": name, "t": t},
    st.sampled_from([event.value for event in Event]) | st.text(max_size=6),
    st.floats(-1e15, 1e15),
    st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4),
)


@attrs.define
class ToldRun:
    """One run directory; `tell` is what a launcher, a monitor or a rank does."""

    run_dir: RunDirectory
    journals: dict[str, Journal] = attrs.field(factory=dict)

    @classmethod
    def make(cls, folder: Path) -> ToldRun:
        """Make the directory `folder/run`."""
        return cls(RunDirectory.create(folder / "run"))

    def journal(self, writer: str = "launcher", host: str = HOST) -> Journal:
        """Return the journal of one writer."""
        key = f"{host} {writer}"
        if key not in self.journals:
            self.journals[key] = Journal(self.run_dir.journal, writer=writer, host=host, boot_id="b", job="job-1")
        return self.journals[key]

    def tell(self, event: Event, *, writer: str = "launcher", **fields: Any) -> None:
        """Write one event."""
        self.journal(writer).emit(event, **fields)

    def begin(self) -> None:
        """Tell that a job and its first attempt began."""
        self.tell(Event.RUN_START)
        self.tell(Event.ATTEMPT_START, ranks=[0, 1], world_size=2)

    def fail_and_recover(self, number: int = 1, attempt: int = 0) -> None:
        """Tell of a hang, the next attempt, and that it steps again."""
        self.tell(Event.SUSPECT, writer="monitor", attempt=attempt, step=40, rank=1)
        told = {"id": f"{number:04}-hang", "kind": "hang", "category": "network", "cause": "link_down"}
        self.tell(Event.INCIDENT, attempt=attempt, action="restart", culprits=[1], **told)
        self.tell(Event.ATTEMPT_END, attempt=attempt, ended_by="hang", exit_codes={"0": 1, "1": 1})
        self.tell(Event.ATTEMPT_START, attempt=attempt + 1, ranks=[0, 1], world_size=2)
        self.tell(Event.RECOVERED, attempt=attempt + 1, id=told["id"], recovery_s=4.0, lost_steps=3)

    def place(self, *, interval_s: float = 0.05) -> base.TelemetryOrigin:
        """Return the place of sinks that serve this run."""
        state = self.run_dir.path / "telemetry" / HOST
        state.mkdir(parents=True, exist_ok=True)
        live = Live(self.run_dir.path, None, {"RESILIENCE_PAGE_DIR": str(self.run_dir.path / "no pages")})
        return base.TelemetryOrigin(self.run_dir.path, HOST, live, state, interval_s)

    def lines(self) -> list[Line]:
        """Return everything that was told, as sinks get it."""
        return Follower(self.run_dir.journal, HOST).read()


def line(event: dict[str, Any], offset: int = 1) -> Line:
    """Return a line with this event."""
    return Line(event, ReadMark("here-launcher-1.jsonl", offset), is_new=True)
