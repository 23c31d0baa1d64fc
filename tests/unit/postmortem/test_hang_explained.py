"""What the kernel says of the node is put beside a hang that the monitor could not explain."""

import pytest

from resilience_sdk.attribution.exits import classification
from resilience_sdk.cluster.bus import NodeRelay
from resilience_sdk.core.journal import Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.incidents import Evidence, Incident, IncidentStore
from resilience_sdk.launcher.restart_policy import decide
from resilience_sdk.postmortem.collect import NodeEnd, read_end
from resilience_sdk.postmortem.facts import AttemptFacts, EndedBy
from resilience_sdk.postmortem.report import Reporter

LOST_GPU = classification("gpu_fell_off_bus", 0.9, Evidence("kernel", "NVRM: Xid (PCI:0000:17:00): 79, off the bus"))


def conclude(tmp_path, confidence, told=(LOST_GPU,), **verdict):
    """Return the incident of a hang and the end of its attempt, with a lost GPU in the kernel's log."""
    run_dir = RunDirectory.create(tmp_path / "run")
    journal = Journal(run_dir.journal, writer="launcher", host="here", boot_id="", job="job")
    store = IncidentStore(run_dir.path)
    hang = Incident(
        kind="hang",
        attempt=0,
        category="hang",
        cause="hang_rank_stopped",
        action="restart",
        confidence=confidence,
        evidence=(Evidence("stack", "all wait"),),
    )
    written = store.create("hang", hang)
    facts = AttemptFacts(attempt=0, node="here", exits=(), traces={}, ended_by=EndedBy.HANG, node_told=told)
    reporter = Reporter(run_dir, journal, NodeRelay(None, journal), term_grace_s=1.0)
    finding = reporter.conclude(facts, {"incident": written.id, **verdict}, None)
    journal.close()
    return store.get(written.id), finding.end


def test_a_guess_gives_way_to_the_kernel(tmp_path):
    """The incident says both, and the node is to be left out."""
    incident, end = conclude(tmp_path, 0.3)
    assert (incident.category, incident.cause, incident.action) == ("hardware", "gpu_fell_off_bus", "exclude_node")
    assert [item.source for item in incident.evidence] == ["kernel", "stack"]
    assert (end.cause, end.action, end.confidence) == ("gpu_fell_off_bus", "exclude_node", 0.9)


@pytest.mark.parametrize("confidence", [0.6, 0.95])
def test_a_sure_finding_stays(tmp_path, confidence):
    """A rank that was stopped by somebody is not the GPU's doing."""
    incident, end = conclude(tmp_path, confidence)
    assert (incident.cause, end.cause, end.action) == ("hang_rank_stopped", "hang_rank_stopped", "restart")


def test_what_the_monitor_grants_and_refuses_comes_to_the_decision(tmp_path):
    """Free, or the last one, whose incident then says stop; a verdict of another shape is neither."""
    assert conclude(tmp_path / "a", 0.9, (), free=True)[1].free
    incident, end = conclude(tmp_path / "b", 0.9, (), final="it hung at train.py:15 for the third time")
    assert (incident.action, end.final) == ("stop", "it hung at train.py:15 for the third time")
    assert (decide([end], 3).exit_code, decide([end], 3).reason) == (77, end.final)
    _, end = conclude(tmp_path / "c", 0.9, (), free="yes", final=3)
    assert (end.free, end.final) == (False, None)


def test_other_nodes_are_told_what_the_monitor_granted():
    """Their launchers decide alike: the same words come out as went in."""
    end = NodeEnd(1, hang=True, incident="0001-hang", free=True, final="the third time", stood="rank 1 ...")
    assert read_end(1, end.to_json()) == end
    assert read_end(1, {"hang": True, "free": 1, "final": "", "stood": []}) == NodeEnd(1, hang=True)
