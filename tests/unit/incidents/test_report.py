"""report.md says who, where, why, what was lost and what to do, whatever the job's texts contain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.incidents import ACTIONS, Culprit, Evidence, Incident
from resilience_sdk.incidents.record import compact_ranks, headline, in_short, render_markdown

HUNG = Incident(
    id="0001-hang",
    kind="hang",
    attempt=0,
    detected_at=0.0,
    culprits=(Culprit(1, "node-a", 40, "bwd", tuple(f"model.py:{n} f{n}" for n in range(20))),),
    victims=(0, *range(2, 64)),
    category="hang",
    cause="hang_rank_stopped",
    confidence=0.9,
    evidence=(
        Evidence("proc", "rank 1 is stopped"),
        Evidence("flight", "collective 12 is missing on rank 1"),
    ),
)


def test_the_page_answers_the_five_questions():
    """Which rank, where, why, what was lost, what to do next."""
    page = render_markdown(HUNG, meaning="a rank stands still")
    assert "Rank 1 on `node-a` made no progress in section `bwd` at step 40" in page
    assert "    model.py:0 f0\n" in page
    assert "and 8 more in `stacks/rank-1.txt`" in page
    assert "    proc    rank 1 is stopped\n    flight  collective 12 is missing on rank 1\n" in page
    assert "0, 2-63 (63 ranks)" in page
    assert "a rank stands still" in page
    assert "has not gone on yet" in page
    assert "starts the next attempt" in page


def test_cannot_tell_is_said():
    """Without culprits nobody is accused."""
    page = render_markdown(Incident(kind="hang"))
    assert "no rank can be named" in page
    assert "cannot tell" in page
    assert headline(Incident()) == "The job failed: unknown (unknown); no rank can be named."


def test_the_title_of_a_crash_says_what_was_raised():
    """Exception and message beside the name of the cause, whose meaning stands below."""
    raised = Evidence("exception", "ValueError: negative sequence length `-3` in batch\nof worker 2")
    incident = Incident(
        kind="crash", culprits=(Culprit(1, step=40),), cause="user_code_error", category="user", evidence=(raised,)
    )
    title = "Rank 1 died at step 40 with `ValueError: negative sequence length '-3' in batch`: user_code_error (user)."
    assert headline(incident) == title
    page = render_markdown(incident, meaning="an exception of the program")
    assert page.index(title) < page.index("an exception of the program")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("", ""),
        ("\n  bad input\nsecond line", "bad input"),
        ("Error(s) in loading:\n\tMissing key(s): w\n\tmore", "Error(s) in loading: Missing key(s): w"),
        ("word " * 100, "word " * 32 + "..."),
        ("x" * 500, "x" * 160 + " ..."),
    ],
)
def test_a_message_is_cut_where_it_reads_well(message, shown):
    """First line; the second where the first one leads to it; never far into a long one."""
    assert in_short(message) == shown


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_its_advice(action):
    """No page ends without saying what to do next."""
    assert "not known to this version" not in render_markdown(Incident(action=action))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([2, 0, 1, 1], "0-2"), ([0, 2, 3, 9], "0, 2-3, 9")],
)
def test_ranks_are_compact(ranks, text):
    """A thousand victims are one span, not a thousand words."""
    assert compact_ranks(ranks) == text


hostile = st.text() | st.sampled_from(
    ["```\n# x", "</pre><script>", "a\x1b[2Jb", "x`y`", "|a|b|", "\u202eevil", "\r\n\n# x"]
)


@given(hostile, hostile, hostile, hostile)
def test_the_jobs_text_stays_in_its_block(evidence, frame, section, cause):
    """No control character, no line of its own, no markup outside of code survives."""
    page = render_markdown(
        Incident(
            kind="crash",
            cause=cause,
            culprits=(Culprit(0, section, 1, section, (frame,)),),
            evidence=(Evidence("exception", evidence),),
        )
    )
    assert all(c.isprintable() or c == "\n" for c in page)
    headings = [line for line in page.split("\n") if line.startswith("#")]
    assert len(headings) == 5
    outside = "".join(part for line in page.split("\n") if not line.startswith("    ") for part in line.split("`")[::2])
    assert "<" not in outside
