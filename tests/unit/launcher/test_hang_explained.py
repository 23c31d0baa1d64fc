"""What the kernel says of the node is put beside a hang that the monitor could not explain."""

import pytest

from resilience_sdk.attribution.exits import classification
from resilience_sdk.incidents import Evidence, Incident, IncidentStore
from resilience_sdk.journal import Journal
from resilience_sdk.launcher.decision import EndedBy
from resilience_sdk.launcher.evidence import Facts
from resilience_sdk.launcher.relay import NodeRelay
from resilience_sdk.launcher.reporter import Reporter
from resilience_sdk.run_directory import RunDirectory

LOST_GPU = classification("gpu_fell_off_bus", 0.9, Evidence("kernel", "NVRM: Xid (PCI:0000:17:00): 79, off the bus"))


def conclude(tmp_path, confidence):
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
    facts = Facts(attempt=0, node="here", exits=(), traces={}, ended_by=EndedBy.HANG, node_told=(LOST_GPU,))
    reporter = Reporter(run_dir, journal, NodeRelay(None, journal), term_grace_s=1.0)
    finding = reporter.conclude(facts, {"incident": written.id}, None)
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
