"""Who asked a job to leave: what signals and the order of events tell, and what they leave open."""

import pytest

from resilience_sdk.postmortem.preemption import account
from resilience_sdk.preemption.reasons import IN_VAIN, Asker, who_asked

FILE = {"event": "preempt_notice", "kind": Asker.FILE.value, "source": "preempt", "by": "ann@head", "host": "n0"}
LAUNCHER = {"event": "preempt_notice", "source": "SIGTERM", "host": "n0", "rank": None}
GAVE_UP = {"event": "degraded", "what": "preemption", "why": IN_VAIN}


def heard(rank, job="elastic-1"):
    """A signal that the monitor has seen on the page of a rank."""
    facts = {"kind": Asker.SIGNAL.value, "source": f"rank {rank}: SIGTERM", "rank": rank}
    return {"event": "preempt_notice", "host": "n0", "job": job, **facts}


def stops(*heard_by, ranks=2, step=None):
    """The agreed stop of the ranks of a node, and which of them had a signal until then."""
    told = [{"event": "stop_agreed", "host": "n0", "rank": rank, "step": step} for rank in range(ranks)]
    return [{**event, "heard": "SIGTERM" if event["rank"] in heard_by else None} for event in told]


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ([heard(0), *stops(0, 1)], "SIGTERM to all 2 ranks on n0, as torchrun passes it on"),
        ([heard(0), *stops(0)], "SIGTERM to rank 0 on n0 alone, so not by torchrun"),
        ([heard(1), *stops(1, 2, ranks=3)], "SIGTERM to ranks 1-2 on n0"),
        ([heard(0), *stops(0, ranks=1)], "SIGTERM to rank 0 on n0, by torchrun or somebody else"),
        ([heard(0)], "SIGTERM to rank 0 on n0, by torchrun or somebody else"),
        ([heard(0), heard(1)], "SIGTERM to ranks 0-1 on n0"),
        ([heard(0, "slurm-7.0"), *stops(0, 1)], "SIGTERM to all 2 ranks on n0, as Slurm passes it on"),
        ([heard(0, "pid-n0-1-2"), *stops(0, ranks=1)], "SIGTERM to rank 0 on n0"),
        ([heard(0, "launcher-1-2-n0"), *stops(0)], "SIGTERM to rank 0 on n0 alone"),
    ],
)
def test_a_signal_of_a_launcher_is_told_from_one_that_somebody_sent_to_a_rank(told, asked):
    """A launcher tells all its ranks; where there is one rank, either may have sent it, and that is said."""
    assert who_asked(told).asked == (asked,)


def test_a_signal_after_a_request_in_vain_is_what_ended_the_job():
    """The request is told beside it, and the cause is the signal's."""
    found = who_asked([FILE, GAVE_UP, LAUNCHER, *stops(step=9)])
    assert (found.asked, found.cause) == (("SIGTERM to the launcher on n0",), "preemption_sigterm")
    assert found.in_vain == ("resilience preempt of ann@head",)
    told = account([FILE, GAVE_UP, LAUNCHER], {}, node="n0", saved=None, saved_here=False, died={})
    assert told.reason() == (
        "the job was asked to leave by SIGTERM to the launcher on n0 "
        "(and before that, in vain, by resilience preempt of ann@head)"
    )


def test_where_no_stop_was_agreed_the_signal_ended_the_job_and_not_the_request_before_it():
    """A request ends nobody. Where all ranks stopped, they did for who had asked first."""
    assert who_asked([FILE, LAUNCHER]).asked == ("SIGTERM to the launcher on n0",)
    agreed = who_asked([FILE, LAUNCHER, *stops(0, 1)])
    assert (agreed.asked[0], agreed.in_vain) == ("resilience preempt of ann@head", ())


def test_a_request_that_was_given_up_and_followed_by_nobody_still_asked():
    """A stop may be agreed after its time."""
    assert who_asked([FILE, GAVE_UP, *stops()]).asked == ("resilience preempt of ann@head",)
