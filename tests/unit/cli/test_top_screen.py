"""The screen of `resilience top`: it fits, it says what is wrong in words, and what a job says stays text."""

from __future__ import annotations

import io

import needed
import pytest
from hypothesis import given
from hypothesis import strategies as st
from views import HOSTILE, ROWS, VIEWS, row, view

from resilience_sdk.cli.top_screen import LEAST_WIDTH, Sheet, cells, lines, plain
from resilience_sdk.report.live_view import SORTS, LiveView, RankRow, with_rows

SCREEN = Sheet(80, 24, keys="q quit")
STALL = "no progress for 10 s: rank 1 stopped (section 'data'); rank 0 waits for it in all_reduce 46; verdict in 52 s"


def screen(shown: LiveView, sheet: Sheet = SCREEN) -> list[str]:
    return [plain(line) for line in lines(shown, sheet)]


def drawn(shown: LiveView, sheet: Sheet) -> list[str]:
    """What rich makes of it, on a terminal of that size."""
    console = needed.library("rich.console", "top")
    text = needed.library("rich.text", "top").Text
    file = io.StringIO()
    made = console.Console(
        file=file, width=sheet.width, height=sheet.height, force_terminal=True, color_system="256", record=True,
        highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    pieces = [text.assemble(*line, end="") for line in lines(shown, sheet)]
    made.print(text("\n", no_wrap=True, overflow="crop", end="").join(pieces))
    found: list[str] = made.export_text(styles=False).split("\n")
    return found[:-1]


def test_a_rank_that_is_stopped_heads_the_table() -> None:
    """With a sign, its age and when it is called hung; the notice stands above, in words."""
    rows = [row(0, activity="waits", age_s=15.2, deadline_s=315.0, sections=("bwd",)), row(2, sections=("fwd", "attn"))]
    rows += [row(1, activity="stopped", age_s=15.2, deadline_s=62.0, sections=("data",))]
    shown = screen(view(rows, stall={"since": 1.0, "at": 2.0, "text": STALL}, events=((1.0, "stall", STALL),)))
    table = [line for line in shown if line[:6].strip(" !?~").isdigit()]
    assert table[0] == "!    1  100       15s /   62s stopped  data"
    assert [line.split()[0] for line in table] == ["!", "0", "2"]
    assert table[2].endswith("fwd > attn")
    assert sum("no progress for 10 s" in line for line in shown) == 1


def test_a_job_of_4096_ranks_fits_on_80_by_24() -> None:
    """The worst ranks, what the others do, and the last events."""
    ranks = [row(rank, node=f"node-{rank // 8:04}", step=123_456) for rank in range(4095)]
    ranks.append(row(4095, node="node-0511", step=123_456, activity="stuck", age_s=15.0, deadline_s=60.0))
    told = tuple((float(at), "ckpt_commit", f"checkpoint after {at} steps is whole") for at in range(12))
    shown = view(ranks, nodes=512, events=told, goodput=0.9, wall_s=100.0, buckets={"productive": 90.0, "hang": 10.0})
    page = screen(shown)
    assert len(page) == 24
    assert any(line.startswith("! 4095 node-0511") for line in page)
    assert sum(line.startswith("     0 ") or " node-0000 " in line for line in page) <= 20
    assert any("of 4,096 ranks (runs 4,095, stuck 1)" in line for line in page)
    assert page[-1] == "q quit"
    assert sum("checkpoint after" in line for line in page) >= 3
    whole = [plain(line) for line in lines(shown, Sheet(80))]
    assert sum(" node-0" in line for line in whole) == 20


def test_each_place_of_knowledge_is_named() -> None:
    """What other nodes have told, and what only the journal tells, is no look."""
    told = row(1, node="b", seen="node", seen_s=1.4)
    old = row(2, node="c", seen="journal", seen_s=90.0, age_s=None, deadline_s=None)
    shown = screen(view([row(0), told, old], nodes=3))
    assert [line.split()[-1] for line in shown if line[:6].strip().isdigit()] == ["now", "1.4s", "90s*"]
    assert any("* by the journal" in line for line in shown)


def test_the_bar_of_the_account_is_as_long_as_its_time() -> None:
    """Each bucket has its share of it; the rest of the line says the largest in words."""
    buckets = {"productive": 50.0, "startup": 25.0, "hang": 25.0}
    (line,) = (one for one in screen(view([row(0)], goodput=0.5, wall_s=100.0, buckets=buckets)) if "goodput" in one)
    assert line == f"goodput 50.0% of 1.7 min  {'█' * 10}{'▒' * 10}  startup 25%, hang 25%"
    (line,) = (
        one for one in screen(view([row(0)], goodput=1.0, wall_s=9.0, buckets={"productive": 9.0})) if "goo" in one
    )
    assert line == f"goodput 100.0% of 9.0 s  {'█' * 20}"


def test_a_run_that_stands_says_for_how_long() -> None:
    """In the place of its speed, and as a part of the bar: it is no progress."""
    facts = {"steps_per_s": 2.0, "goodput": 0.5, "wall_s": 68.0, "buckets": {"productive": 34.0, "standing": 34.0}}
    page = "\n".join(screen(view([row(0)], standing_s=34.0, **facts)))
    assert "step 100   standing for 34.0 s" in page
    assert "steps/s" not in page
    assert "standing 50%" in page
    assert "steps/s" in "\n".join(screen(view([row(0)], **facts)))


def test_a_run_that_has_ended_says_how() -> None:
    """In place of the attempt."""
    shown = view([], state="ended", outcome="preempted, exit code 75: asked by SIGTERM", world_size=2)
    assert any(line.startswith("ended: preempted, exit code 75: asked by SIGTERM") for line in screen(shown))
    assert "nothing has run in it yet" in "\n".join(screen(LiveView("/r", 1.0)))


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_job_says_stays_text(name: str) -> None:
    """Markup is not obeyed, a control character does not get through, and no width deceives."""
    rows = [row(0, node=name, sections=(name, name), activity="paused", detail=name), row(1, node="b")]
    shown = view(rows, nodes=2, stragglers=(name,), events=((1.0, name, name),), problems=(name,))
    page = drawn(shown, SCREEN)
    assert all(cells(line.rstrip()) <= 80 for line in page)
    assert len(page) == 24
    assert not any("\x1b" in line for line in screen(shown))
    if name.startswith("["):
        assert any(name in line for line in page)


@given(
    VIEWS,
    st.lists(ROWS, max_size=30, unique_by=lambda row: row.rank),
    st.integers(1, 200),
    st.none() | st.integers(1, 60),
    st.booleans(),
    st.sampled_from(SORTS),
)
def test_any_view_fits(
    bare: LiveView, rows: list[RankRow], width: int, height: int | None, is_unicode: bool, sort: str
) -> None:
    """No line is wider than the screen and no page is longer, whatever a job tells of itself."""
    page = lines(with_rows(bare, rows, sort), Sheet(width, height, is_unicode, keys="q quit" if height else ""))
    assert all(sum(cells(text) for text, _ in line) <= max(width, LEAST_WIDTH) for line in page)
    assert height is None or len(page) <= max(height, 1)
    assert is_unicode or all(text.isascii() for line in page for text, _ in line)
    assert all(text.isprintable() for line in page for text, _ in line)
