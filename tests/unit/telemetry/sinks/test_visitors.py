"""Who fetches metrics, and how long somebody is waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from resilience_sdk.telemetry.sinks import prometheus
from resilience_sdk.telemetry.sinks.prometheus import LONGEST_STAY_S, Visitors


class _Time:
    """A clock of the test's own, which passes only where somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=lambda: self.now))

    def waited(self, who: Visitors) -> float:
        """Return how long is waited when nobody comes any more."""

        def wait(seconds: float) -> None:
            self.now += seconds

        who._changed.wait = wait  # type: ignore[assignment, method-assign]
        began = self.now
        who.wait_for_all()
        return self.now - began

    def visits(self, who: Visitors, address: str, *at: float) -> None:
        """Let somebody come at these times."""
        for moment in at:
            self.now = moment
            with who.visit(address):
                who.note_request()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> _Time:
    """Time that does not pass by itself."""
    return _Time(monkeypatch)


def test_one_who_comes_regularly_is_waited_for_a_little_longer_than_his_interval(time: _Time) -> None:
    """And one who came once as long as Prometheus' own default takes."""
    who = Visitors()
    time.visits(who, "a", 0.0, 15.0, 30.0)
    assert time.waited(who) == pytest.approx(1.5 * 15 + 1)
    once = Visitors()
    time.visits(once, "a", 30.0)
    assert time.waited(once) == LONGEST_STAY_S


def test_somebody_else_behind_the_same_address_makes_the_wait_no_shorter(time: _Time) -> None:
    """Of the last pauses the longest counts."""
    who = Visitors()
    time.visits(who, "a", 0.0, 30.0, 30.5)
    assert time.waited(who) == pytest.approx(1.5 * 30 + 1)


def test_nobody_waits_for_one_who_has_gone_or_was_refused(time: _Time) -> None:
    """Three intervals without a visit are a scrape that was switched off."""
    who = Visitors()
    time.visits(who, "a", 0.0, 10.0)
    time.now = 100.0
    with who.visit("refused"):
        pass
    assert time.waited(who) == 0


def test_each_of_two_is_waited_for(time: _Time) -> None:
    """Two servers of Prometheus scrape each for itself; one that knows the end is not waited for."""
    who = Visitors()
    time.visits(who, "a", 0.0, 10.0)
    time.visits(who, "b", 8.0, 18.0)

    def wait(_: float) -> None:
        time.visits(who, "a", time.now + 2)

    who._changed.wait = wait  # type: ignore[assignment, method-assign]
    began = time.now
    who._is_over = True
    time.visits(who, "a", 20.0)
    assert who._awaited_until(began) == pytest.approx(began + 16)
    time.visits(who, "b", 28.0)
    assert who._awaited_until(began) == began
