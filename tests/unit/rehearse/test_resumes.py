"""The save that an attempt went on from, by its weights: who begins an epoch anew has not loaded nothing."""

from __future__ import annotations

import attrs
import pytest
from planted_runs import attempt

from resilience_sdk.rank.rehearsal import RehearsedRank, RehearsedSave
from resilience_sdk.rehearse.plan import JobFacts, learn
from resilience_sdk.rehearse.resumes import Resume, last_resume

STEPS = 20


def found(*attempts: RehearsedRank, progress: str = "optimizer") -> Resume:
    """Return what is known of the last of these attempts."""
    undisturbed = JobFacts((0,), 1.0, ((attempt(0, 0, STEPS, (7, 14), progress),),), (), ())
    return last_resume(learn(undisturbed, 1), JobFacts((0,), 1.0, (attempts,), (), ()))


@pytest.mark.parametrize("progress", ["optimizer", "heartbeats"])
def test_it_is_the_save_whose_weights_come_first(progress: str) -> None:
    """Also where the loop counts anew; what was in it and what was loaded is known, too."""
    resume = found(attempt(0, 0, 10, (7,), progress), attempt(1, 7, 13, (), progress), progress=progress)
    assert resume == Resume(7, 0, frozenset({"optimizer"}), frozenset({"optimizer"}))


def test_more_steps_than_were_left_are_a_place_that_is_lost() -> None:
    """The epoch of 10 began anew behind the save after 17 steps."""
    resume = found(attempt(0, 0, 18, (7, 17)), attempt(1, 17, 10))
    assert (resume.after, resume.more) == (17, 7)


def test_an_attempt_that_began_anew_has_the_weights_of_the_start() -> None:
    """Where the script is seeded; else nobody knows them."""
    assert found(attempt(0, 0, 10, (7,)), attempt(1, 0, STEPS)).after == 0
    assert found(attempt(0, 0, 10, (7,)), attempt(1, 0, STEPS, begins=99.0)).after is None
    assert found(attempt(0, 0, STEPS)) == Resume(), "it was never started again"


def test_a_save_of_a_later_attempt_counts_from_where_that_began() -> None:
    """It was killed twice, and had saved in between."""
    resume = found(attempt(0, 0, 10, (7,)), attempt(1, 7, 8, (4,)), attempt(2, 11, 9))
    assert (resume.after, resume.more) == (11, 0)


def test_a_save_in_the_background_is_found_by_the_steps() -> None:
    """The weights were those of a later step by the time at which it was written."""
    late = attrs.evolve(attempt(0, 0, 10), saved=(RehearsedSave(8, ((8.0, 1.0),)),), saves=(8,))
    assert found(late, attempt(1, 7, 13)).after == 7


def test_weights_that_stood_still_are_no_place_that_is_lost() -> None:
    """Gradients were added up over four steps, or the rate was 0: the same weights were there after several steps."""

    def still(trace: RehearsedRank) -> RehearsedRank:
        return attrs.evolve(trace, looks=tuple(attrs.evolve(look, weights=(1.0, 1.0)) for look in trace.looks))

    resume = found(still(attempt(0, 0, 12, (7,))), still(attempt(1, 7, 13)))
    assert (resume.after, resume.more) == (7, 0)


def test_a_step_that_only_makes_the_optimizers_state_is_none() -> None:
    """As `torch.distributed.checkpoint` makes it before it loads: with the weights of the start, and counted."""
    last = attempt(1, 6, 14)
    last = attrs.evolve(last, looks=(attrs.evolve(last.looks[0], weights=(0.0, 1.0)), *last.looks[1:]))
    assert found(attempt(0, 0, 10, (7,)), last) == found(attempt(0, 0, 10, (7,)), attempt(1, 7, 13))
