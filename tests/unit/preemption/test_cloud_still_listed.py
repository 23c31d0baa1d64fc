"""When a notice that is still listed stops a job again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.preemption.cloud import CloudNotice, Heeded, heeded_before, still_stands

NOTICE = CloudNotice("azure reboot", "scheduled event Reboot f020", 1000.0)
seconds = st.floats(0, 2000)


def test_a_new_notice_stands() -> None:
    """Nobody has obeyed it."""
    assert still_stands(NOTICE, [], 0.0, 60.0)


def test_an_obeyed_one_stands_again_when_a_save_just_fits() -> None:
    """It came at 100 and ends at 1000; a save needs 60 s."""
    obeyed = [Heeded(100.0, 1000.0)]
    assert not still_stands(NOTICE, obeyed, 101.0, 60.0)
    assert not still_stands(NOTICE, obeyed, 939.0, 60.0)
    assert still_stands(NOTICE, obeyed, 940.0, 60.0)
    assert not still_stands(NOTICE, [Heeded(938.0, 1000.0)], 940.0, 60.0)  # it has hardly begun again
    assert not still_stands(NOTICE, [*obeyed, Heeded(940.0, 1000.0)], 950.0, 60.0)


def test_one_that_came_late_or_without_an_end_stops_once() -> None:
    """Half a minute is less than a save needs; what has no end gave `preempt_time`, which is what a save needs."""
    preempted = CloudNotice(
        "gcp preempted", "the machine is preempted", 135.0
    )  # seen anew: its end is not to be trusted
    assert not still_stands(preempted, [Heeded(100.0, 130.0)], 105.0, 60.0)
    advice = CloudNotice("aws rebalance", "rebalance recommendation", None)
    assert not still_stands(advice, [Heeded(100.0, 160.0)], 1e9, 60.0)


@given(st.none() | seconds, st.floats(0.1, 600), st.lists(seconds, max_size=40))
def test_one_notice_stops_a_job_at_most_twice(end: float | None, lead_s: float, looks: list[float]) -> None:
    """However often the job is started on the machine, and whenever it looks."""
    notice = CloudNotice("azure reboot", "x", end)
    obeyed: list[Heeded] = []
    for now in sorted(looks):
        if still_stands(notice, obeyed, now, lead_s):
            left_s = lead_s if end is None else max(0.0, end - now)
            obeyed.append(Heeded(now, now + left_s))
    assert len(obeyed) <= (1 if end is None else 2)


def line(event: str, t: float, boot_id: str = "here", **fields: object) -> dict[str, object]:
    return {"event": event, "t": t, "boot_id": boot_id, **fields}


def test_the_journal_tells_who_has_obeyed() -> None:
    """On this machine since its last start, this notice, and only where the ranks then agreed on a stop."""
    told = {"source": NOTICE.source, "reason": NOTICE.reason, "time_left_s": 900.0}
    events = [
        line("preempt_notice", 100.0, **told),
        line("stop_agreed", 101.0),
        line("preempt_notice", 110.0, "elsewhere", **told),
        line("stop_agreed", 200.0, "elsewhere"),
        line("preempt_notice", 90.0, **{**told, "reason": "scheduled event Reboot 1111"}),
        line("preempt_notice", 95.0, source="SIGTERM", time_left_s=60.0),
        line("preempt_notice", 150.0, **told),  # and then a rank died
    ]
    assert heeded_before(events, NOTICE, "here") == [Heeded(100.0, 1000.0)]
