"""The price of each wait, by the rules: seconds until a rank that never goes on is named.

`docs/design/monitor.md` has the table. It is played here second by second: what is waited in x what the other rank does
x in which tier.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from resilience_sdk.hang.activity import ActivityTracker
from resilience_sdk.hang.detect import expected, judge
from resilience_sdk.hang.evidence import ThreadStack
from resilience_sdk.hang.samples import ActivitySample, ChildProcess, ThreadCounters
from resilience_sdk.hang.timers import HangRules
from resilience_sdk.hang.waits import On, Wait

SECOND = 1_000_000_000
RULES = HangRules()
PAGE = Path(__file__).parents[3] / "docs" / "design" / "monitor.md"
LIB = "/usr/lib/python3.11"
EVENT = (f"{LIB}/threading.py:327 wait", f"{LIB}/threading.py:629 wait", "/home/me/train.py:9 main")
FUTURE = (f"{LIB}/threading.py:327 wait", f"{LIB}/concurrent/futures/_base.py:451 result", "/home/me/train.py:9 main")
QUEUE = (f"{LIB}/threading.py:327 wait", f"{LIB}/queue.py:171 get", "/home/me/train.py:9 main")
LOOP = (f"{LIB}/selectors.py:468 select", f"{LIB}/asyncio/base_events.py:1871 _run_once", "/home/me/train.py:9 main")
WORKS = ThreadStack(5, "worker", False, ("/home/me/client.py:12 fetch",), native_id=8)
HOUSE = ThreadStack(
    6, "QueueListener", False, (f"{LIB}/queue.py:171 get", f"{LIB}/logging/handlers.py:1507 dequeue"), native_id=9
)
MAX_S = 700
LONGER = "its deadline"


@attrs.frozen
class Case:
    """A wait that begins when the rank has just worked; ends are seconds from then."""

    on: On
    ends_s: float | None = None
    frames: tuple[str, ...] = EVENT
    worker: Wait | None = None
    polls_one: bool = False
    wakes: bool = False
    state: str = "S"
    child: str | None = None
    in_collective: bool = False


def after(on, seconds):
    """The wait of another thread that ends so long after the rank's last work."""
    return Wait(on, int(seconds * SECOND), since_ns=0)


CASES = {
    "a lock, beside nobody or housekeeping": Case(On.LOCK),
    "a mutex of native code": Case(On.MUTEX),
    "a lock beside a thread on a socket, pipe, child or file": Case(On.LOCK, worker=Wait(On.SOCKET)),
    "a lock beside `Timer(120)`": Case(On.LOCK, worker=after(On.LOCK, 120)),
    "a lock beside `Timer(400)`": Case(On.LOCK, worker=after(On.LOCK, 400)),
    "a lock beside `Timer(3600)`": Case(On.LOCK, worker=after(On.LOCK, 3600)),
    "a future": Case(On.LOCK, frames=FUTURE),
    "`join` or a queue, beside a thread on a lock": Case(On.LOCK, frames=QUEUE, worker=Wait(On.LOCK)),
    "`join` or a queue whose thread has died": Case(On.LOCK, frames=QUEUE),
    "`join(90)`, `result(400)`": Case(On.LOCK, 400, frames=FUTURE),
    "a future of a thread that sleeps for 400 s": Case(On.LOCK, frames=FUTURE, worker=after(On.SLEEP, 400)),
    "a sleep, or a lock with a time, of 30 s": Case(On.SLEEP, 30),
    "of 90 s": Case(On.LOCK, 90),
    "of 590 s": Case(On.SLEEP, 590),
    "of an hour": Case(On.SLEEP, 3600),
    "`asyncio.sleep(90)`": Case(On.POLL, 90, frames=LOOP, polls_one=True),
    "`asyncio.sleep(400)`": Case(On.POLL, 400, frames=LOOP, polls_one=True),
    "a socket, pipe or child, with or without a time-out": Case(On.SOCKET, 400),
    "a file that does not answer": Case(On.FILE),
    "a child that is stopped": Case(On.PIPE, child="T"),
    "short sleeps in a loop": Case(On.SLEEP, 1, wakes=True),
    "a call that the kernel does not end (`D`)": Case(On.FILE, state="D"),
    "stopped by a signal": Case(On.LOCK, state="T"),
    "a collective, as the other": Case(On.LOCK, 1800, in_collective=True),
}
TIERS = ("in a step", "unchanged script", "before the first step", "alone, unchanged")


def sample(case, at_s):
    """What is seen of the rank so many seconds after its last work."""
    switches = at_s if case.wakes else 0
    end_s = at_s + 1 if case.wakes else case.ends_s
    return ActivitySample(
        int(at_s * SECOND),
        case.state if at_s else "S",
        ThreadCounters(10**9, 0, 100 + switches, 0),
        case.on,
        end_ns=None if end_s is None else int(end_s * SECOND),
        polls_one=case.polls_one,
        children={7: ChildProcess(10**9, 0, 0, case.child)} if case.child else {},
        workers={} if case.worker is None else {8: case.worker},
    )


def state_of(make, number, tier, at_s, activity, case):
    """The rank as its page and /proc show it."""
    kind = "pulse" if "unchanged" in tier else "heartbeat"
    starts = tier == "before the first step"
    stack = () if starts else (make.beat(at_s, kind=kind),)
    page = (
        {"beats": 0, "created": float(at_s), "declared": True}
        if starts
        else {"world_size": 1 if "alone" in tier else 2}
    )
    return make.rank(
        number,
        *stack,
        activity=activity,
        in_collective=case.in_collective,
        process_state=case.state,
        **page,
    )


def price(make, case, tier, other="waits", others_s=0.0):
    """Seconds until the rank is named, in which the other waits for it, or computes for `others_s` seconds before."""
    book = make.book()
    book.add("step", "heartbeat", [1.0] * 50)
    book.add("step", "pulse", [1.0] * 50)
    awaited, waiting = ActivityTracker(0, RULES.horizon_s), ActivityTracker(0, RULES.horizon_s)
    waits = Case(On.LOCK, in_collective=True)
    for at_s in range(MAX_S):
        awaited.add(sample(case, at_s))
        if at_s % 10 == 7:
            awaited.note_stack(at_s * SECOND, case.frames, (HOUSE,) if case.worker is None else (HOUSE, WORKS))
        works = attrs.evolve(sample(waits, at_s), beating=ThreadCounters(at_s * SECOND, 0, 1, 0))
        waiting.add(works if at_s < others_s else sample(waits, at_s))
        if at_s < 50 or at_s % 2:
            continue
        found = awaited.activity(in_collective=case.in_collective)
        states = [state_of(make, 1, tier, at_s, found, case)]
        if "alone" not in tier:
            inside = other == "waits" and at_s >= others_s
            beside = waiting.activity(in_collective=inside)
            states.insert(0, state_of(make, 0, tier, at_s, beside, attrs.evolve(waits, in_collective=inside)))
        if judge(expected(states), book, make.now, RULES, stalled=True).kind == "confirmed":
            return at_s
    return None


def table():
    """The table of the page: by wait, the price in each tier as it stands there."""
    text = PAGE.read_text().partition("### The price of a wait")[2].partition("\n\n|")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return rows[0], {row[0]: row[1:] for row in rows[2:]}


def test_the_page_has_every_wait_and_tier():
    """No more and no less."""
    head, rows = table()
    assert (tuple(head[1:]), list(rows)) == (TIERS, list(CASES))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CASES)
def test_a_wait_costs_what_the_page_says(make, name, tier):
    """To the second or two that a look takes."""
    if CASES[name].in_collective and "alone" in tier:
        pytest.skip("a collective of one rank")
    told = table()[1][name][TIERS.index(tier)]
    found = price(make, CASES[name], tier)
    if told == LONGER:
        assert found is None
    else:
        assert found == pytest.approx(int(told), abs=2.0)


@pytest.mark.parametrize("name", ["a lock, beside nobody or housekeeping", "of 90 s", "a future"])
def test_what_the_others_do_makes_no_difference_once_they_wait(make, name):
    """While another rank of the same step computes, nobody is waited for alone; then the count is the same."""
    case, alone = CASES[name], price(make, CASES[name], "in a step")
    assert price(make, case, "in a step", others_s=20.0) == pytest.approx(alone, abs=2.0)
    assert price(make, case, "in a step", others_s=400.0) == pytest.approx(max(400.0, alone), abs=10.0)
