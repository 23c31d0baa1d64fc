"""How a stop is explained: who asked, what came of it, who hindered it, and what to change."""

import re
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.journal import Event
from resilience_sdk.incidents import Culprit, Evidence
from resilience_sdk.incidents.record import headline, render_markdown
from resilience_sdk.postmortem.preemption import account, hindered_by
from resilience_sdk.preemption.reasons import Asker, Hindrance
from resilience_sdk.recorder.page_reader import LaneView, OpenSection, RankSnapshot
from resilience_sdk.report import why_page
from resilience_sdk.report.why_page import JobEnding

LAUNCHER = {"event": "preempt_notice", "source": "SIGTERM", "host": "n0", "rank": None}
HEARD = {"event": "preempt_notice", "source": "rank 1: SIGTERM", "kind": "signal", "host": "n0", "rank": 1}


def notice(kind, **facts):
    return {"event": Event.PREEMPT_NOTICE.value, "kind": kind.value, "host": "n0", "rank": None, **facts}


def page(rank, checks, step=None, section=None, is_global=True):
    """As much of a page as the story is told from."""
    names = {"step": "heartbeat"} | ({} if section is None else {section: "compute"})
    lane = LaneView(
        1, 0, 1, step, is_global, tuple(OpenSection(name, kind, 0, None, 0) for name, kind in names.items())
    )
    return Page(rank=rank, checks=checks, step=step, step_is_global=is_global, main_lane=lane)


class Page(SimpleNamespace):
    """A rank that has completed a step, and still runs."""

    beats, declared, trains, done, exit_state = 1, True, False, False, "running"
    completed_steps = RankSnapshot.completed_steps


def story(*told, pages=(), saved=None, saved_here=False, died=()):
    by_rank = {one.rank: one for one in pages}
    return account(told, by_rank, node="n0", saved=saved, saved_here=saved_here, died=dict(died))


@pytest.mark.parametrize(
    ("told", "cause", "asked"),
    [
        ([LAUNCHER], "preemption_sigterm", "SIGTERM to the launcher on n0"),
        ([LAUNCHER, HEARD], "preemption_sigterm", "SIGTERM to the launcher on n0"),
        ([HEARD], "preemption_sigterm", "SIGTERM to rank 1 on n0"),
        (
            [notice(Asker.FILE, source="preempt", by="ann@head", reason="kernel update")],
            "preemption_requested",
            "resilience preempt of ann@head: kernel update",
        ),
        ([notice(Asker.FILE, source="preempt")], "preemption_requested", "the file preempt in the run directory"),
        (
            [
                notice(Asker.REQUEST, source="request", rank=2, reason="disk is full"),
                notice(Asker.REQUEST, source="rank 2: preemption.request()", rank=2),
            ],
            "preemption_requested",
            "preemption.request() in rank 2 on n0: disk is full",
        ),
        (
            [notice(Asker.END, source="rank 0: the scheduler's end time", rank=0)],
            "slurm_time_limit",
            "the scheduler, whose time for the job ends",
        ),
        (
            [notice(Asker.CLOUD, source="aws spot", reason="terminate at 12:00")],
            "preemption_notice",
            "the cloud (aws spot: terminate at 12:00)",
        ),
        ([{**LAUNCHER, "kind": "of another version"}], "preemption_sigterm", "SIGTERM to the launcher on n0"),
    ],
)
def test_the_cause_is_who_asked_and_what_only_repeats_it_is_left_out(told, cause, asked):
    """What a launcher or a rank has told itself is not told again by the monitor that saw it on a page."""
    found = story(*told)
    assert (found.askers.asked, found.askers.cause) == ((asked,), cause)
    incident = found.incident(0, 1.0, {})
    assert (incident.cause, incident.category, incident.action) == (cause, "scheduler", "requeue")
    assert asked in headline(incident).replace("`", "")
    assert found.reason() == f"the job was asked to leave by {asked}"


def test_an_agreed_stop_names_nobody_and_says_what_is_lost():
    """Also where a rank was late for a while: it has stopped with the others."""
    late = {"event": "degraded", "hindrance": "late", "culprits": [{"rank": 1, "node": "n0"}]}
    found = story(LAUNCHER, late, {"event": "stop_agreed", "step": 40}, saved=40, saved_here=True)
    assert found.reason().endswith("; all ranks stopped after 40 steps, 0 steps lost")
    incident = found.incident(0, 1.0, {0: 75})
    assert (incident.culprits, incident.lost_steps, incident.advice) == ((), 0, None)
    assert "no rank" not in render_markdown(incident)


def stop(rank, step=None):
    return {"event": "stop_agreed", "rank": rank, "step": step}


def save(rank, step):
    return {"event": "ckpt_begin", "rank": rank, "step": step}


@pytest.mark.parametrize("told", [stop(0), stop(0, 39)], ids=["check()", "check(index)"])
def test_a_loop_that_saves_by_itself_at_the_agreed_stop_has_lost_nothing(told):
    """What it saved there tells how far it was, whatever it had given to `check()`."""
    found = story(LAUNCHER, save(0, 30), stop(1), told, save(0, 40), saved=40, saved_here=True)
    assert (found.stopped_after, found.lost_steps) == (40, 0)
    assert found.reason().endswith("; all ranks stopped after 40 steps, 0 steps lost")


def test_a_save_before_the_stop_or_one_that_failed_tells_nothing_of_it():
    """What a rank began before it stopped is older, and what is not the newest checkpoint was not completed."""
    before = story(LAUNCHER, save(0, 40), stop(1), stop(0), saved=40)
    failed = story(LAUNCHER, stop(0), save(0, 40), saved=30)
    for found, newest in ((before, 40), (failed, 30)):
        assert found.lost_steps is None
        assert f"the newest checkpoint is after {newest} steps; what came after it is lost" in found.reason()


def test_where_the_loop_counts_its_steps_the_pages_tell_how_many_were_done_at_the_stop():
    """A step is complete when all ranks have completed it, and one that a rank is in is not."""
    done = page(0, 9, 41)
    done.main_lane = attrs.evolve(done.main_lane, stack=())
    found = story(LAUNCHER, stop(0), pages=(done, page(1, 9, 41)), saved=40)
    assert (found.stopped_after, found.lost_steps) == (41, 1)
    assert found.reason().endswith("; all ranks stopped after 41 steps, 1 step lost")


def test_a_loop_that_saves_without_the_sdk_reads_that_and_no_puzzle():
    """Nobody can tell what it has saved."""
    found = story(LAUNCHER, stop(0))
    assert found.reason().endswith("; all ranks stopped, the SDK saved nothing, what the script saved itself is kept")
    assert "what the script saved itself is kept" in str(found.incident(0, 1.0, {}).evidence)


def test_a_stop_that_came_too_late_for_its_save_names_who_was_late():
    """The last save was skipped, because nothing was agreed before."""
    late = {
        "event": "degraded",
        "hindrance": "late",
        "culprits": [{"rank": 1, "node": "n0", "step": 39, "section": "eval", "step_is_global": True}],
    }
    skip = {"event": "ckpt_skip", "expected_s": 30.0, "time_left_s": 2.0}
    incident = story(LAUNCHER, late, {"event": "stop_agreed", "step": 40}, skip, saved=32).incident(0, 1.0, {})
    assert [culprit.rank for culprit in incident.culprits] == [1]
    assert incident.lost_steps == 8
    text = render_markdown(incident)
    assert "rank 1 on n0 did not call preemption.check() again (in section eval at step 39)" in text
    assert "it takes about 30.0 s, 2.0 s were left" in text


def test_a_rank_that_never_checks_is_named_with_what_it_was_in_and_the_cure():
    """From the pages, whether or not a monitor had the time to say it."""
    pages = (page(0, 50, 12), page(1, 0, 12, "generate"))
    said = {"event": "degraded", "hindrance": "no_check", "culprits": [{"rank": 1, "node": "n0"}]}
    for told in ((LAUNCHER,), (LAUNCHER, said)):
        found = story(*told, pages=pages, saved=8)
        incident = found.incident(0, 1.0, {0: -9, 1: -9})
        assert [(one.rank, one.node, one.section) for one in incident.culprits] == [(1, "n0", "generate")]
        assert incident.lost_steps == 4
        whole = "rank 1 on n0 never calls preemption.check() (in section generate at step 12)"
        assert f"; no stop was agreed; 4 steps lost; {whole}; to do: call preemption.check() in the loop of rank 1" in (
            found.reason()
        )
        text = render_markdown(incident)
        assert text.count(whole) == 2  # headline and evidence
        assert "call preemption.check() in the loop of rank 1" in text.partition("## What to do next")[2]


def test_where_nobody_checks_nobody_is_accused_and_the_cure_is_said():
    """A script without the SDK in its loop."""
    found = story(LAUNCHER, pages=(page(0, 0), page(1, 0)))
    incident = found.incident(0, 1.0, {0: -15, 1: -15})
    assert incident.culprits == ()
    assert "no rank has called preemption.check()" in found.reason()
    assert "run.steps()" in str(incident.advice)


def test_a_rank_that_died_of_its_own_hindered_the_stop():
    """With how it ended."""
    found = story(LAUNCHER, pages=(page(0, 9), page(1, 9, 3, is_global=False)), died={1: "exited with code 1"})
    assert "rank 1 on n0 exited with code 1 (at step 3 of this attempt)" in found.reason()


def test_what_ranks_of_other_nodes_did_is_told_by_their_monitors():
    """Each node journals its own, and one that is told by all ranks alike is told once."""
    other = {"event": "degraded", "hindrance": "no_check", "culprits": [{"rank": 3, "node": "n1"}]}
    alike = {"event": "degraded", "hindrance": "cut_off"}
    found = story(LAUNCHER, other, alike, alike, pages=(page(0, 9),))
    assert list(map(str, found.hindered)) == [
        "rank 3 on n1 never calls preemption.check()",
        "a rank could not reach the others",
    ]


def test_ranks_are_grouped_by_where_they_were():
    """A thousand of them are no thousand words."""
    ranks = [Culprit(n, "n0", 7, "bwd") for n in range(1, 900)]
    assert str(hindered_by(Hindrance.LATE, (Culprit(0, "n0", 7, "eval"), *ranks))) == (
        "ranks 0-899 on n0 did not call preemption.check() again "
        "(rank 0 in section eval at step 7, ranks 1-899 in section bwd at step 7)"
    )


@pytest.mark.parametrize("kind", Hindrance)
def test_every_hindrance_has_its_words_and_its_cure(kind):
    """With ranks and without."""
    for culprits in ((), (Culprit(1, "n0"),), (Culprit(1), Culprit(2))):
        found = hindered_by(kind, culprits)
        assert "{" not in str(found) + found.cure
        assert kind.told in str(found)


values = st.none() | st.integers() | st.text() | st.lists(st.none() | st.dictionaries(st.text(), st.integers()))
keys = st.sampled_from(
    ["kind", "hindrance", "culprits", "rank", "step", "reason", "by", "source", "host", "expected_s", "time_left_s"]
)
told_events = st.builds(
    lambda name, facts: {**facts, "event": name.value},
    st.sampled_from([Event.PREEMPT_NOTICE, Event.STOP_AGREED, Event.DEGRADED, Event.CKPT_SKIP]),
    st.dictionaries(keys, values | st.sampled_from([*Asker, *Hindrance])),
)


@given(st.lists(told_events))
def test_whatever_stands_in_a_journal_the_story_is_told(events):
    """Events of other versions, or of nobody's making."""
    found = story(*events)
    assert found.reason()
    assert render_markdown(found.incident(0, 1.0, {}))


def test_a_stop_whose_signal_was_injected_says_so():
    """In one line of evidence: who asked, cause and action are those of a scheduler's SIGTERM."""
    by = "RESILIENCE_FAULT=preempt:rank=1,step=3"
    struck = {"event": "fault_injected", "t": 0.0, "rank": 1, "step": 3, "by": by}
    plain, told = (story(*events).incident(0, 9.0, {}) for events in ([HEARD], [struck, HEARD]))
    note = Evidence("fault", f"injected by {by}, which struck rank 1 at step 3")
    assert [one for one in told.evidence if one not in plain.evidence] == [note]
    assert attrs.evolve(told, evidence=plain.evidence) == plain


def test_a_page_tells_a_stop_that_nobody_checked_for_once():
    """The incident names the hindrance and what is kept; the end of the job adds only that no stop was agreed."""
    found = story(LAUNCHER, pages=(page(0, 0), page(1, 0)))
    ending = JobEnding(verdict="preempted", exit_code=75, reason=found.reason(), resume="again", ended_at=2.0)
    text = "\n".join(why_page.page([found.incident(0, 1.0, {})], ending))
    assert [text.count(words) for words in ("preemption.check()", "call preemption", "Call preemption")] == [2, 0, 1]
    assert text.casefold().count("the sdk saved nothing") == 1
    assert re.search(r"The job ended at .* with exit code 75: no stop was agreed\.\n", text)
    beside = why_page.ending_words(ending, headline(found.incident(0, 1.0, {})), found.advice)[0]
    assert beside.endswith(
        "with exit code 75: no stop was agreed; the SDK saved nothing, what the script saved itself is kept."
    )
