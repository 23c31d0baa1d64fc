"""Ports of InfiniBand and RoCE devices, from files in the form of /sys/class/infiniband."""

import pytest

from resilience_sdk.health.changes import judge_growth
from resilience_sdk.health.findings import Status
from resilience_sdk.health.network import infiniband


def port(device, state="4: ACTIVE", physical="5: LinkUp", rate="400 Gb/sec (4X NDR)", layer="InfiniBand", **counters):
    """Return the files of the first port of a device."""
    place = f"/sys/class/infiniband/{device}/ports/1"
    files = {"state": state, "phys_state": physical, "rate": rate, "link_layer": layer}
    hardware = {"local_ack_timeout_err", "out_of_sequence", "packet_seq_err", "rnr_nak_retry_err"}
    for name, count in counters.items():
        files[f"{'hw_counters' if name in hardware else 'counters'}/{name}"] = count
    return {f"{place}/{name}": f"{text}\n" for name, text in files.items()}


def findings(machine, *files):
    """Return what is said of a machine with these ports, by check and subject."""
    root = machine({name: text for part in files for name, text in part.items()})
    return {(f.check, f.subject): f for f in infiniband.port_findings(infiniband.ports(root))}


def test_active_ports_are_in_order(machine):
    """Counters at rest and a cable's few symbol errors are no fault."""
    found = findings(machine, port("mlx5_0", symbol_error=3, link_downed=0), port("mlx5_1"))
    assert {finding.status for finding in found.values()} == {Status.OK}
    assert found["rdma_port", "mlx5_0 port 1"].value == 400


def test_a_machine_without_fabric_says_so(machine):
    """That is no fault."""
    assert findings(machine)["rdma", ""].status is Status.UNAVAILABLE


@pytest.mark.parametrize(
    ("state", "physical", "status"),
    [
        ("1: DOWN", "3: Disabled", Status.OK),
        ("1: DOWN", "2: Polling", Status.OK),
        ("2: INIT", "5: LinkUp", Status.FAILED),
        ("1: DOWN", "6: LinkErrorRecovery", Status.FAILED),
    ],
)
def test_a_port_that_nobody_uses_is_no_fault(machine, state, physical, status):
    """One that is linked and not active is: the subnet manager does not answer, or the link breaks."""
    found = findings(machine, port("mlx5_0"), port("mlx5_1", state=state, physical=physical))
    assert found["rdma_port", "mlx5_1 port 1"].status is status


def test_no_active_port_at_all_is_a_fault(machine):
    """NCCL would fall back to TCP and be slow without a word."""
    found = findings(machine, port("mlx5_0", state="1: DOWN", physical="2: Polling"))
    assert found["rdma", ""].status is Status.FAILED
    assert "ibstat" in found["rdma", ""].cure


def test_a_slow_port_beside_a_fast_one(machine):
    """Its cable trained at less."""
    found = findings(machine, port("mlx5_0"), port("mlx5_1", rate="200 Gb/sec (4X HDR)"))
    slow = found["rdma_port", "mlx5_1 port 1"]
    assert (slow.status, slow.value, slow.threshold) == (Status.DEGRADED, 200, 400)
    assert found["rdma_port", "mlx5_0 port 1"].status is Status.OK


@pytest.mark.parametrize(
    ("check", "counters", "status"),
    [
        ("rdma_link_errors", {"link_downed": 1}, Status.DEGRADED),
        ("rdma_link_errors", {"link_downed": 0, "link_error_recovery": 0}, Status.OK),
        ("rdma_packet_errors", {"symbol_error": 101}, Status.DEGRADED),
        ("rdma_packet_errors", {"local_ack_timeout_err": 1001}, Status.DEGRADED),
        ("rdma_packet_errors", {"symbol_error": 100, "port_rcv_errors": 10}, Status.OK),
    ],
)
def test_error_counters_are_told_by_name(machine, check, counters, status):
    """A link that went down did so for a reason; a few symbol errors have none."""
    found = findings(machine, port("mlx5_0", **counters))[check, "mlx5_0 port 1"]
    assert (found.status, found.value) == (status, sum(counters.values()))
    assert next(iter(counters)) in found.evidence
    assert found.data["counters"] == counters


@pytest.mark.parametrize(
    ("check", "counter", "grown", "is_news"),
    [
        ("rdma_link_errors", "link_downed", 1, True),
        ("rdma_packet_errors", "out_of_sequence", 50, False),
        ("rdma_packet_errors", "out_of_sequence", 5000, True),
    ],
)
def test_counters_that_grow_during_a_run_are_news(machine, check, counter, grown, is_news):
    """A link that goes down while a job runs is the fault itself; packets are sent again all the time."""
    before, after = (list(findings(machine, port("mlx5_0", **{counter: count})).values()) for count in (0, grown))
    judged = {finding.check: finding for finding in judge_growth(before, after, 60.0)}
    assert (judged[check].status is Status.DEGRADED) is is_news
