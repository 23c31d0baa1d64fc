"""The agreement on a stop as it is: real ranks, monitors and relays, interleaved at will, that die at any moment."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
from steered_job import Job, TwoNodes, agreed_job, two_nodes_asked
from steered_nodes import GRACE_S

from resilience_sdk.core.journal import read_journal
from resilience_sdk.preemption import agreement, context
from resilience_sdk.preemption.agreement import TEARDOWN
from resilience_sdk.preemption.context import MONITOR, coordinator_word
from resilience_sdk.recorder import page_layout


def test_a_monitor_that_takes_over_lets_a_stop_stand_that_was_agreed(request):
    """One rank has stopped, the monitor dies, the next one looks: the other rank stops at the same check."""
    job = agreed_job(request)
    job.coordinator_dies(0, is_replaced=True)
    job.coordinator_goes_on(0, 60)
    job.rank_goes_on(1, 12)
    assert job.ranks[1].stopped_at == job.ranks[0].stopped_at


def test_a_rank_that_left_and_looks_like_a_failed_one_does_not_undo_the_stop(request):
    """Its exit code is unknown to the monitor, which must not call the stop a teardown."""
    job = agreed_job(request)
    job.stopped_rank_leaves(code_is_known=False)
    job.coordinator_goes_on(0, 60)
    job.rank_goes_on(1, 12)
    assert job.ranks[1].stopped_at == job.ranks[0].stopped_at


@pytest.mark.parametrize("kind", ["older than the job", "a link"])
def test_a_file_that_nobody_put_there_for_this_job_asks_nobody(request, kind):
    """`RUN_DIR/preempt` of a job before, or a link to something of somebody else, is no notice."""
    job = Job()
    job.start(ranks=2, apart=1, silent=9)
    request.addfinalizer(job.teardown)
    path = job.run_dir / "preempt"
    if kind == "a link":
        path.symlink_to("/etc/hostname")
    else:
        path.touch()
        os.utime(path, (400, 400))
    job.all_go_on(10, 12, 25)
    assert not any(rank.page.words[page_layout.W_CONTROL] for rank in job.ranks)
    assert all(rank.completed > 5 for rank in job.ranks)


TestJob = Job.TestCase
TestJob.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


TestTwoNodes = pytest.mark.slow(TwoNodes.TestCase)
TestTwoNodes.settings = settings(
    max_examples=8, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_notice_on_one_node_counts_on_all_with_the_time_that_is_left(request):
    """No rank elsewhere is told of more time, nor of much less."""
    job = two_nodes_asked(request)
    first, second = (rank.page.words[page_layout.W_DEADLINE_NS] / 1e9 for rank in job.ranks)
    assert first - 1.0 < job.hands.now + GRACE_S <= first + 1.0
    assert abs(first - second) < 1.0


def test_a_rank_that_failed_on_one_node_makes_a_teardown_of_all(request):
    """Who was asked to leave elsewhere did not get a preemption either."""
    job = two_nodes_asked(request)
    job.rank_dies(1, luck=0)
    for _ in range(40):
        job.hands.now += 0.05
        for node in job.nodes:
            node.relay_goes_on()
            node.coordinator_goes_on(60)
    assert job.ranks[0].page.words[page_layout.W_CONTROL] == TEARDOWN
    assert job.ranks[0].stopped_at is None


@pytest.mark.slow
def test_a_node_that_is_cut_off_goes_on_alone_and_says_so(request, capfd):
    """Its rank at the proposed check waits as long as the bound allows, then no longer; nobody is blocked."""
    job = two_nodes_asked(request)
    while not job.ranks[1].page.words[page_layout.W_CONTROL]:
        job.hands.now += 0.02
        job.all_go_on(1, 6, 25)
    job.nodes[1].is_cut = True
    while not job.nodes[1].is_alone:
        job.hands.now += 0.02
        job.all_go_on(1, 6, 25)
    passed = job.ranks[1].completed
    for _ in range(20):
        job.hands.now += 0.02
        job.all_go_on(1, 6, 25)
    assert all(rank.completed > passed for rank in job.ranks)
    assert "whether all nodes stop is not known" in capfd.readouterr().err
    (event,) = [e for e in read_journal(job.run_dir / "journal").events if e["event"] == "degraded"]
    assert event["what"] == "preemption"


@pytest.mark.parametrize(
    ("name", "facts", "counts"),
    [
        ("verdict-0.json", {"kind": "hang"}, False),
        ("ending-0.json", {"reason": "rank failed"}, False),
        ("ending-0.json", {"reason": "preemption"}, True),
        ("ending-1.json", {"reason": "rank failed"}, True),
    ],
)
def test_a_signal_that_ends_a_hung_or_failed_attempt_asks_nobody_to_leave(request, name, facts, counts):
    """Ranks hear it all the same, and the other node must not be told of a preemption."""
    job = TwoNodes()
    job.start(ranks=2, apart=1, silent=9)
    request.addfinalizer(job.teardown)
    (job.nodes[0].pages / name).write_text(json.dumps(facts))
    job.notice(0, int(signal.SIGTERM))
    job.all_go_on(10, 12, 25)
    assert any(rank.page.words[page_layout.W_DEADLINE_NS] for rank in job.ranks) is counts
    job.asked = counts


@pytest.mark.parametrize("kind", [Job, TwoNodes])
def test_the_end_that_the_scheduler_told_is_not_cut_down_to_a_grace(request, monkeypatch, kind):
    """159 s are left when the notice comes, because a save takes 100; every rank may use them, and all stop."""
    job = kind()
    job.start(ranks=2, apart=1, silent=9)
    request.addfinalizer(job.teardown)
    monkeypatch.setenv(context.SLURM_END, str(job.hands.now + 159))
    job.patched.setattr(context, "time", job.hands.module)
    job.all_go_on(3, 12, 25)
    job.notice(0, page_layout.NOTICE_END)
    while not all(rank.stopped_at for rank in job.ranks):
        job.hands.now += 0.02
        job.all_go_on(1, 12, 25)
    left = job.hands.now - 1000.0
    assert left < 20
    assert [rank.listener.time_left() for rank in job.ranks] == [pytest.approx(159 - left)] * 2
    told = [e for e in read_journal(job.run_dir / "journal").events if e["event"] == "preempt_notice"]
    assert [(e["source"], e.get("time_left_s")) for e in told] == [("rank 0: the scheduler's end time", None)]


def test_a_signal_after_a_request_is_told_too_and_once(request):
    """Nobody is ended by a request, so who sends a signal after it may be who ends the job."""
    job = Job()
    job.start(ranks=2, apart=1, silent=1)  # one that never checks: no stop can be agreed
    request.addfinalizer(job.teardown)
    job.notice(0, page_layout.NOTICE_REQUEST)
    job.all_go_on(10, 12, 25)
    for rank in (1, 0):
        job.ranks[rank].page.words[page_layout.W_NOTICE] = int(signal.SIGTERM)
        job.all_go_on(10, 12, 25)
    told = [e for e in read_journal(job.run_dir / "journal").events if e["event"] == "preempt_notice"]
    assert [(e["kind"], e["rank"]) for e in told] == [("request", 0), ("signal", 1)]
    job.asked = False  # it was not for the ranks to stop


@pytest.mark.parametrize(("notice", "left_s"), [(page_layout.NOTICE_END, 159), (page_layout.NOTICE_REQUEST, GRACE_S)])
def test_without_a_monitor_too_only_the_schedulers_end_has_a_time_of_its_own(request, monkeypatch, notice, left_s):
    """The ranks know it from their environment; any other notice leaves `preempt_time`."""
    job = Job()
    job.start(ranks=2, apart=1, silent=9)
    request.addfinalizer(job.teardown)
    job.coordinator_dies(0, is_replaced=False)
    monkeypatch.setenv(context.SLURM_END, str(job.hands.now + 159))
    job.patched.setattr(context, "time", job.hands.module)
    job.ranks[0].handlers.note(notice)
    assert job.ranks[0].listener.time_left() == pytest.approx(left_s)


@pytest.mark.parametrize("gone", ["ended", "unseen", "agreed"])
def test_a_rank_without_which_nothing_can_be_agreed_is_named_once(request, capfd, gone):
    """One that has ended early or that no monitor sees; not those that leave one by one after an agreed stop."""
    job = agreed_job(request) if gone == "agreed" else Job()
    if gone != "agreed":
        job.start(ranks=2, apart=1, silent=9)
        request.addfinalizer(job.teardown)
        job.notice(0, int(signal.SIGTERM))
    agreement.make_link(coordinator_word(job.nodes[0].pages, 0), MONITOR)
    if gone == "unseen":
        job.nodes[0].ranks.pop()
    else:
        job.ranks[0].die()
    for _ in range(3):
        job.hands.now += 3.0
        for _ in range(10):
            job.coordinator_goes_on(0, 12)
    said = capfd.readouterr().err
    told = {"ended": "rank 0 on host#0 has ended", "unseen": "rank 1 is seen by no monitor"}.get(gone)
    assert said.count("no stop can be agreed") == said.count(str(told)) == (told is not None)
    events = [e for e in read_journal(job.run_dir / "journal").events if e["event"] == "degraded"]
    assert [e["ranks"] for e in events] == {"ended": [[0]], "unseen": [[1]], "agreed": []}[gone]
    job.asked = False  # no stop can come of it


def test_a_rank_that_does_not_check_any_more_is_named_when_half_of_the_time_is_over(request, capfd):
    """It may sit in an evaluation: the stop is late and comes to nothing, and the incident can say because of whom."""
    job = Job()
    job.start(ranks=2, apart=50, silent=9)
    request.addfinalizer(job.teardown)
    job.all_go_on(3, 12, 25)
    job.notice(0, int(signal.SIGTERM))
    for _ in range(10):
        job.hands.now += 4.0
        for _ in range(10):
            job.coordinator_goes_on(0, 12)
        if job.hands.now < 1000.0 + GRACE_S / 2:
            assert "did not call" not in capfd.readouterr().err
    said = capfd.readouterr().err
    assert said.count("ranks 0-1 on host#0 did not call preemption.check() again") == 1
    (event,) = [e for e in read_journal(job.run_dir / "journal").events if e["event"] == "degraded"]
    assert (event["hindrance"], event["ranks"]) == ("late", [0, 1])
    assert [culprit["node"] for culprit in event["culprits"]] == ["host#0", "host#0"]
    job.asked = False  # it was not for the ranks to stop
