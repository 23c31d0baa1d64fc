"""Views of runs as `resilience top` shows them: built by hand, and any at all."""

from __future__ import annotations

from hypothesis import strategies as st

from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.report import live_view
from resilience_sdk.report.live_view import LiveView, RankRow

AT = 1_700_000_000.0
# What a job may call its sections and nodes: markup, escapes, wide, combining and invisible characters.
HOSTILE = (
    "[bold red]x[/]",
    "\x1b[2J\x1b[31m",
    "層" * 30,
    "e\u0301" * 40,
    "a\nb\tc",
    "\u202eabc",
    "👩‍👩‍👧‍👦",
    "\ud800",
    "x" * 300,
)
TEXTS = st.sampled_from(HOSTILE) | st.text(max_size=40)
_FLOATS = st.none() | st.floats(0, 1e12) | st.sampled_from([float("inf"), float("nan")])
_COUNTS = st.none() | st.integers(0, 1 << 62)
_ACTIVITIES = ("runs", "waits", "still", "starts", "gone", "done", "left", "stopped", "stuck", "busy", "polling")
ROWS = st.builds(
    RankRow,
    rank=st.integers(0, 1 << 24),
    node=st.none() | TEXTS,
    step=_COUNTS,
    step_is_global=st.none() | st.booleans(),
    age_s=_FLOATS,
    deadline_s=_FLOATS,
    sections=st.lists(TEXTS, max_size=4).map(tuple),
    activity=st.sampled_from(_ACTIVITIES) | TEXTS,
    detail=st.none() | TEXTS,
    score=st.none() | st.floats(0, 1),
    is_slow=st.booleans(),
    seen=st.sampled_from([live_view.PAGE, live_view.NODE, live_view.JOURNAL]),
    seen_s=_FLOATS,
)
_TOLD = st.lists(st.tuples(st.floats(0, 1e12), TEXTS, TEXTS), max_size=12).map(tuple)
VIEWS = st.builds(
    LiveView,
    run_dir=TEXTS,
    at=st.just(AT),
    state=st.sampled_from(["running", "finished", "ended", "lost", "empty"]),
    outcome=st.none() | TEXTS,
    attempt=_COUNTS,
    world_size=_COUNTS,
    nodes=st.none() | st.integers(1, 5000),
    started_at=st.none() | st.floats(0, 1e12),
    step=_COUNTS,
    step_is_global=st.none() | st.booleans(),
    steps_per_s=st.none() | st.floats(0, 1e9),
    wall_s=st.floats(0, 1e9),
    standing_s=st.floats(0, 1e9),
    goodput=st.none() | st.floats(0, 1),
    buckets=st.dictionaries(st.sampled_from([bucket.value for bucket in Bucket]), st.floats(0, 1e9)),
    stall=st.none() | TEXTS.map(lambda text: {"since": AT, "at": AT, "text": text}),
    stragglers=st.lists(TEXTS, max_size=8).map(tuple),
    incidents=st.integers(0, 1000),
    last_incidents=_TOLD,
    checkpoint_step=_COUNTS,
    checkpoint_at=st.none() | st.floats(0, 1e12),
    events=_TOLD,
    problems=st.lists(TEXTS, max_size=4).map(tuple),
)


def row(rank: int, **facts: object) -> RankRow:
    """Return a rank that comes on, but for these facts."""
    usual = {"step": 100, "step_is_global": True, "age_s": 0.1, "deadline_s": 30.0, "activity": "runs"}
    return RankRow(rank, **{**usual, "seen": live_view.PAGE, "seen_s": 0.0, "node": "a", **facts})  # type: ignore[arg-type]


def view(rows: list[RankRow], sort: str = "worst", **facts: object) -> LiveView:
    """Return a running job with these ranks."""
    usual = {"state": "running", "attempt": 0, "attempts": 1, "world_size": len(rows), "nodes": 1, "step": 100}
    bare = LiveView(run_dir="/runs/one", at=AT, **{**usual, **facts})  # type: ignore[arg-type]
    return live_view.with_rows(bare, rows, sort)
