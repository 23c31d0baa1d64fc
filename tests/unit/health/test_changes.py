"""Two looks, one after the other."""

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.health.changes import judge_growth, worsened
from resilience_sdk.health.findings import Finding, Status


def _counter(value, per_minute=10.0, status=Status.OK):
    growth = {"growth": {"per_minute": per_minute, "cure": "the cure"}}
    return Finding(probe="gpu", check="errors", subject="GPU 0", status=status, value=value, data=growth)


_counts = st.integers(0, 10**6)
_seconds = st.floats(0, 10**5)


@given(_counts, _counts, _seconds)
def test_growth_is_wrong_only_above_its_rate(before, grown, seconds):
    """A counter is degraded exactly when it grew by more than its rate allows, a minute being the shortest time."""
    (judged,) = judge_growth([_counter(before)], [_counter(before + grown)], seconds)
    allowed = 10 * max(seconds, 60) / 60
    if abs(grown - allowed) > 1e-6 * allowed:
        assert (judged.status is Status.DEGRADED) == (grown > allowed)
    assert (judged.cure == "the cure") == (judged.status is Status.DEGRADED)
    assert judged.value == before + grown


@given(_counts, _seconds)
def test_what_does_not_grow_is_as_it_was(value, seconds):
    """The same number twice says nothing, whatever the time between."""
    finding = _counter(value, per_minute=0)
    assert judge_growth([finding], [finding], seconds) == [finding]


def test_no_growth_is_allowed_where_the_limit_is_none():
    """One uncorrectable error more is told, with by how much it grew."""
    (judged,) = judge_growth([_counter(3, 0)], [_counter(4, 0)], 3600)
    assert judged.status is Status.DEGRADED
    assert judged.evidence == "grew by 1 to 4 within 3600 s"


def test_a_counter_that_was_reset_counts_from_zero():
    """A driver that was loaded anew begins at zero: what it counts since is growth, what is missing is none."""
    (judged,) = judge_growth([_counter(900)], [_counter(50)], 60)
    assert judged.evidence.startswith("grew by 50 to 50")
    (judged,) = judge_growth([_counter(900)], [_counter(0)], 60)
    assert judged.status is Status.OK


def test_growth_makes_nothing_better():
    """What has failed stays failed, and keeps what it said."""
    after = _counter(9, 0, Status.FAILED)
    (judged,) = judge_growth([_counter(1, 0)], [after], 60)
    assert judged.status is Status.FAILED


def test_what_was_not_seen_before_has_no_growth():
    """The first look at a counter is where it starts."""
    assert judge_growth([], [_counter(10**6)], 60) == [_counter(10**6)]


def test_only_what_became_worse_is_told():
    """A fault is told when it comes or grows worse, not again at every look."""

    def finding(check, status):
        return Finding(probe="gpu", check=check, status=status)

    before = [finding("a", "ok"), finding("b", "degraded"), finding("c", "failed"), finding("d", "failed")]
    after = [
        finding("a", "degraded"),
        finding("b", "failed"),
        finding("c", "failed"),
        finding("d", "ok"),
        finding("e", "failed"),
        finding("f", "unavailable"),
    ]
    assert [new.check for new in worsened(before, after)] == ["a", "b", "e"]
