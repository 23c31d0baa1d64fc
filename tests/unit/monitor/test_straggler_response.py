"""What follows a verdict: which incident is whose, and for which verdicts a job is stopped."""

from __future__ import annotations

import attrs
import pytest

from resilience_sdk.incidents import IncidentStore
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.straggler_response import StragglerResponse
from resilience_sdk.straggler.verdicts import Change, Verdict

SLOW = Verdict(
    "persistent", "fwd", "compute", "", (2,), ("n0",), False, 1, 200, 1.5, 0.02, 0.2, confidence=0.8, windows=20
)
ON_GPU = attrs.evolve(SLOW, section_kind="gpu", ratio=2.5)


class Case:
    """A response in a run directory of its own, and what it has asked for."""

    def __init__(self, tmp_path):
        self.run_dir = tmp_path
        self.store = IncidentStore(tmp_path)
        self.start()

    def start(self):
        """Begin as a monitor does, that takes over perhaps."""
        journal = Journal(self.run_dir / "journal", writer="monitor", host="here", boot_id="b", job="j")
        self.asked = []
        self.response = StragglerResponse(self.run_dir, journal, self.store, self.asked.append, job="j", began=0.0)

    def tell(self, *verdicts, changes=(), stop=False):
        self.response.tell(changes, verdicts, stop=stop)


@pytest.fixture
def case(tmp_path):
    (tmp_path / "journal").mkdir()
    return Case(tmp_path)


def test_wall_time_and_time_on_the_gpu_have_an_incident_each(case):
    """The end of one leaves the other open; a monitor that takes over finds each again."""
    case.tell(SLOW, ON_GPU)
    assert [incident.recovered_at for incident in case.store.all()] == [None, None]
    case.start()
    case.tell(ON_GPU, SLOW)
    assert len(case.store.all()) == 2
    case.tell(ON_GPU, changes=[Change("over", SLOW)])
    wall, gpu = case.store.all()
    assert (wall.recovered_at is None, gpu.recovered_at is None) == (False, True)
    assert "on the GPU" in gpu.evidence[0].text


def test_two_roles_have_an_incident_each(case):
    """Their verdicts read alike; the incident of the first is not taken for that of the second."""
    case.tell(SLOW, attrs.evolve(SLOW, role="stage-1"))
    assert len(case.store.all()) == 2


@pytest.mark.parametrize(
    ("change", "stops"),
    [
        ({}, True),
        ({"waits_least": True}, True),
        ({"waits_least": False}, False),
        ({"confidence": 0.59}, False),
        ({"confidence": 0.6}, True),
        ({"kind": "global", "ranks": ()}, False),
        ({"kind": "transient"}, False),
    ],
)
def test_a_job_is_stopped_for_what_is_sure_and_nothing_contradicts(case, change, stops):
    """Without a rank for which the others do not wait, they would be no faster."""
    case.tell(attrs.evolve(SLOW, **change), stop=True)
    assert bool(case.asked) is stops
    assert [incident.action for incident in case.store.all()] == (
        [] if change.get("kind") == "transient" else ["exclude_node" if stops else "none"]
    )


def test_a_job_is_stopped_as_soon_as_the_contradiction_is_gone(case):
    """The verdict stands all the time."""
    case.tell(attrs.evolve(SLOW, waits_least=False), stop=True)
    assert not case.asked
    case.tell(SLOW, stop=True)
    (asked,) = case.asked
    assert (asked.node, asked.incident) == ("n0", case.store.all()[0].id)
