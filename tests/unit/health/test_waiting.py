"""A rendezvous that is not there yet is waited for, and nothing else is."""

import pytest

from resilience_sdk.health.findings import Finding
from resilience_sdk.health.waiting import rendezvous_there

UNKNOWN = Finding(probe="rendezvous", check="resolves", subject="node-0", status="failed", must=True, evidence="none")
SILENT = Finding(probe="rendezvous", check="reach", subject="node-0:1", status="failed", must=True, evidence="no route")
THERE = Finding(probe="rendezvous", check="resolves", subject="node-0", status="ok", must=True)
OTHER = Finding(probe="host", check="load", status="degraded")


def wait(findings, looks=(), limit_s=60.0):
    """Wait with these looks; return what was found, what was said, and how many looks were left."""
    looks, said = list(looks), []
    found = rendezvous_there(findings, lambda: looks.pop(0), limit_s, said.append, again_s=0.0)
    return found, said, len(looks)


def test_it_comes_later():
    """First its name, then its node; that it is waited for is said once."""
    found, said, left = wait([OTHER, UNKNOWN], [[UNKNOWN], [SILENT], [THERE], [UNKNOWN]])
    assert (found, left) == ([OTHER, THERE], 1)
    assert said == ["preflight: node-0 is not there yet (none); trying again for up to 60 s"]


def test_it_never_comes():
    """After the time is over it is told as it is."""
    found, said, _ = wait([OTHER, SILENT], [[SILENT]] * 10_000, limit_s=0.001)
    assert (found, len(said)) == ([OTHER, SILENT], 1)


@pytest.mark.parametrize(
    "found",
    [
        [THERE],
        [Finding(probe="rendezvous", check="own_name", status="failed", must=True, evidence="none")],
        [UNKNOWN, Finding(probe="gpu", check="answers", status="failed", must=True)],
        [Finding(probe="rendezvous", check="resolves", status="failed", must=True, data={"addresses": ["127.0.1.1"]})],
    ],
)
def test_what_time_does_not_cure_is_not_waited_for(found):
    """Nothing is missing, or something else has to be cured first."""
    assert wait(found) == (found, [], 0)
