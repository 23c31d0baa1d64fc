"""What the findings of a preflight mean for a job."""

import os

import pytest

from resilience_sdk.core.journal import Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.health import Finding, Status
from resilience_sdk.launcher import preflight as preflight_module
from resilience_sdk.launcher.options import parse_options
from resilience_sdk.launcher.preflight import decide, headline
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.postmortem.exit_codes import JobVerdict


def finding(probe="host", check="load", status=Status.FAILED, must=True, **more):
    """Return a finding as it comes from the process of the preflight."""
    return Finding(probe=probe, check=check, status=status, must=must, evidence="seen", **more).to_json()


def test_where_the_system_lacks_something_the_job_starts_without(monkeypatch, tmp_path, capfd):
    """A Python that knows a function less stops nobody's job; that is said."""
    journal = Journal(tmp_path, writer="launcher", host="a", boot_id="", job="job")
    options = parse_options([__file__])
    with SignalInbox(["SIGTERM"]) as inbox:
        monkeypatch.delattr(os, "pipe")
        look = preflight_module.preflight(options, RunDirectory.create(tmp_path / "run"), 1, inbox, journal)
    assert look == preflight_module.Look()
    assert "the preflight failed itself, the job starts without" in capfd.readouterr().err


def test_warnings_stop_nothing():
    """Nor does what could not be looked at."""
    found = [
        finding(status=Status.DEGRADED),
        finding(status=Status.UNAVAILABLE),
        finding(must=False),
        finding(status="ok"),
    ]
    assert decide(found, others_go_on=False) is None
    assert decide([], others_go_on=False) is None


@pytest.mark.parametrize(
    ("probe", "check"),
    [
        ("gpu", "row_remap_failure"),
        ("compute", "compute"),
        ("storage", "answers"),
        ("rendezvous", "reach"),
        ("host", "memory_available"),
    ],
)
def test_a_bad_node_is_left_to_others(probe, check):
    """The scheduler sends the job elsewhere; where the job has nodes to spare, it goes on without."""
    decision = decide([finding(), finding(probe, check)], others_go_on=True)
    assert (decision.verdict, decision.exit_code, decision.others_go_on) == (JobVerdict.HARDWARE, 76, True)
    assert check.replace("_", " ") in decision.reason


@pytest.mark.parametrize(
    ("probe", "check"),
    [("host", "open_files"), ("storage", "write"), ("rendezvous", "resolves"), ("network", "chosen_interface")],
)
def test_what_is_the_same_everywhere_has_to_be_cured_first(probe, check):
    """To send the job elsewhere would only lose its place in the queue."""
    decision = decide([finding(probe, check)], others_go_on=True)
    assert (decision.verdict, decision.exit_code, decision.others_go_on) == (JobVerdict.STOP, 77, False)


def test_a_finding_in_one_line():
    """With its subject, where there is one."""
    assert headline(finding("gpu", "row_remap_failure", subject="GPU 3")) == "gpu: row remap failure GPU 3: seen"
    assert headline(finding()) == "host: load: seen"
