"""Builders for ranks in any situation. Session-wide, so that properties may use them too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from resilience_sdk.core.settings import Settings
from resilience_sdk.hang.evidence import FlightRecord, parse_flight_record
from resilience_sdk.hang.timeouts import LearnedTimeouts
from resilience_sdk.hang.timers import RankState
from resilience_sdk.recorder.page_reader import LaneView, OpenSection, RankSnapshot

NOW = 1_000_000_000_000_000  # ns on the monotonic clock of every test
DATA = Path(__file__).parent / "data"


def _section(name, since=1.0, kind="compute", occurrences=10, timeout=None):
    """A section that was entered `since` seconds ago."""
    return OpenSection(name, kind, NOW - int(since * 1e9), timeout, occurrences)


def _beat(since=1.0, occurrences=10, name="step", kind="heartbeat"):
    """A heartbeat that was entered `since` seconds ago."""
    return OpenSection(name, kind, NOW - int(since * 1e9), None, occurrences)


def _snapshot(rank, stack=(), *, beats=10, idle=1.0, beat_ago=None, created=None, world_size=2, step=None, **changes):
    if created is None:
        created = 5e5 if beats else 100.0
    lane = LaneView(
        thread_id=1,
        last_ns=NOW - int(idle * 1e9) if beats else 0,
        beats=beats,
        step=beats if step is None else step,
        step_is_global=step is not None,
        stack=tuple(stack),
        beat_ns=0 if beat_ago is None else NOW - int(beat_ago * 1e9),
    )
    values = {
        "rank": rank,
        "local_rank": rank,
        "world_size": world_size,
        "attempt": 0,
        "pid": 1000 + rank,
        "start_ticks": 1,
        "host": "a",
        "script": "train.py",
        "created_ns": NOW - int(created * 1e9),
        "provisional": False,
        "declared": True,
        "done": False,
        "dumps_stacks": True,
        "paused": None,
        "exit_state": "running",
        "beat_source": "user",
        "checks": 0,
        "collectives": 0,
        "first_beat_ns": None,
        "odd_exits": 0,
        "lost": 0,
        "lanes": (lane,),
    }
    return RankSnapshot(**{**values, **changes})


_PAGE = (
    "beats",
    "idle",
    "beat_ago",
    "created",
    "world_size",
    "step",
    "declared",
    "done",
    "paused",
    "resumed_ns",
    "beat_source",
    "exit_state",
    "checks",
)


def _rank(rank, *stack, **facts):
    """A rank with these open sections, outermost first; facts go to its page or to its process."""
    page = {key: facts.pop(key) for key in _PAGE if key in facts}
    return RankState(rank=rank, snapshot=_snapshot(rank, stack, **page), **facts)


def _book(prior=None, *, world_size=1, script="", pool=1, **settings):
    return LearnedTimeouts(Settings(**settings), prior, script=script, world_size=world_size, pool=pool)


def _flight(scene: str, rank: int) -> FlightRecord:
    record = parse_flight_record((DATA / f"flight-{scene}-{rank}.json").read_text())
    assert record is not None
    return record


@pytest.fixture(scope="session")
def make():
    """`rank`, `section`, `beat`, `snapshot`, `book`, `flight` builders, and the time `now`."""
    return SimpleNamespace(
        rank=_rank,
        section=_section,
        beat=_beat,
        snapshot=_snapshot,
        book=_book,
        flight=_flight,
        now=NOW,
        data=DATA,
    )
