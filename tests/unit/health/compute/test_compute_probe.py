"""What computes where torch was built for the processor alone."""

import pytest

from resilience_sdk.health.compute.probe import built_for_gpus, probe
from resilience_sdk.health.findings import Status
from resilience_sdk.health.probes import Context

torch = pytest.importorskip("torch")


@pytest.mark.skipif(built_for_gpus(torch), reason="this torch was built for GPUs")
def test_the_gpus_of_the_machine_do_not_matter_then():
    """The processor computes once, in the place of the first of them."""
    (other,) = probe(Context(only="cuda:1"))
    assert (other.status, other.evidence) == (Status.UNAVAILABLE, "torch is built for the processor alone")
    computed, speed = probe(Context(only="cuda:0"))
    assert (computed.status, computed.subject, speed.check) == (Status.OK, "cpu", "compute_speed")
