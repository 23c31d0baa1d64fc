"""What works is never ended and never called hung, however long it takes and however loaded the machine is.

Each thing takes much longer than `stuck_after`, which is shortened here, beside two busy loops and the other jobs.
"""

import pytest
from standing_runs import STUCK_AFTER_S, Plan, busy_loops, check_never_ended, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

LONG_S = 2.2 * STUCK_AFTER_S
# By the processor's time, of which these get a part here.
LONG_IN_C_S = 1.5 * STUCK_AFTER_S
SHORT = ("--stuck-after", str(STUCK_AFTER_S))


def in_steps(*things):
    """The job that does these things in its steps, one after the other."""
    return Plan("plain", tuple(f"{what}@{12 + 2 * n}:{long_s(what)}" for n, what in enumerate(things)), run=SHORT)


def long_s(what):
    """Seconds of its work that take longer than anything may that stands still."""
    return LONG_IN_C_S if what in ("held", "released") else LONG_S


PLANS = {
    "steps": in_steps("compute", "write", "child"),
    "other-steps": in_steps("loader", "released", "held"),
    "compiling": Plan("blocks", ("compiling@20",), run=SHORT),
    "first": Plan("blocks", tuple(f"{what}:{LONG_S}" for what in ("compute@eval1", "write@save1")), run=SHORT, ranks=3),
    "eleventh": Plan(
        "blocks",
        tuple(f"{what}:{LONG_S}" for what in ("write@save6", "child@eval11")),
        ("--steps", "65"),
        run=SHORT,
    ),
    "twelfth": Plan(
        "blocks",
        tuple(f"{what}:{LONG_IN_C_S}" for what in ("held@eval12", "released@save7")),
        ("--steps", "75"),
        run=SHORT,
    ),
    "unnamed": Plan("blocks-unnamed", (f"compute@eval11:{LONG_S}",), ("--steps", "60"), run=SHORT),
    "tails": Plan("adapter", (), ("--steps", "60", "--longest", str(1.5 * STUCK_AFTER_S)), run=SHORT),
    "adapter": Plan(
        "adapter",
        tuple(f"{what}:{LONG_S}" for what in ("loader@15", "compute@eval11", "write@save6")),
        ("--steps", "65"),
        run=SHORT,
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All jobs of this file, over now."""
    with busy_loops():
        return run_all(tmp_path_factory.mktemp("healthy"), PLANS, 240)


@pytest.mark.parametrize("name", PLANS)
def test_what_works_is_never_ended(found, name):
    """One attempt, exit 0, no incident, no verdict; what was planned did take as long."""
    check_never_ended(found[name])
    assert len(found[name].notes) == len(PLANS[name].todo)
    for what, (began, ended) in found[name].notes.items():
        assert what.startswith("compiling") or ended - began > 1.2 * STUCK_AFTER_S, what


@pytest.mark.parametrize("name", ["steps", "first", "adapter"])
def test_who_waits_for_it_is_told_and_when_it_went_on(found, name):
    """While it works a notice names no other rank; it is closed when steps go on."""
    told = [
        (int(note.rpartition("-")[2]), {rank["rank"] for rank in stall["ranks"]})
        for note, (began, ended) in found[name].notes.items()
        for stall in found[name].stalls
        if began < stall["t"] < ended
    ]
    assert told
    assert all(ranks == {worker} for worker, ranks in told), told
    assert "went on" in {end["why"] for end in found[name].ends}
    assert "went on after" in found[name].screen
