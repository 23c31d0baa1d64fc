"""Whether all ranks run on the same."""

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.health import compare
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.software import shared, versions
from resilience_sdk.settings import Settings


def torch(version, cuda="12.4"):
    """Return what the software probe says of a torch."""
    return versions.torch_finding({"__version__": version, "cuda": cuda})


def test_one_rank_with_another_torch_stops_the_job():
    """And is named."""
    nodes = {f"rank {n}": [torch("2.6.0")] for n in range(4)} | {"rank 4": [torch("2.5.1")]}
    (found,) = compare(nodes)
    assert (found.check, found.subject, found.stops) == ("same_everywhere", "torch", True)
    assert found.data["odd"] == ["rank 4"]
    assert "2.5.1 on rank 4" in found.evidence
    assert "same version everywhere" in found.cure


def test_of_two_nobody_is_the_odd_one():
    """Neither has a majority."""
    (found,) = compare({"a": [torch("2.6.0")], "b": [torch("2.5.1")]})
    assert found.stops
    assert found.data["odd"] == []
    assert "2.6.0 on a" in found.evidence
    assert "2.5.1 on b" in found.evidence


def test_equal_nodes_have_no_difference():
    """However many there are."""
    assert compare({f"node {n}": [torch("2.6.0")] for n in range(100)}) == []
    assert compare({}) == []


def test_each_value_is_compared_on_its_own():
    """A torch for another CUDA is another torch."""
    found = compare({"a": [torch("2.6.0")], "b": [torch("2.6.0")], "c": [torch("2.6.0", cuda="11.8")]})
    assert [(finding.subject, finding.data["odd"]) for finding in found] == [("cuda", ["c"])]


def test_a_variable_that_one_node_lacks_is_a_warning():
    """Which names the value that the others have."""
    have = list(shared.variables({"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth0"}))
    lack = list(shared.variables({"NCCL_SOCKET_IFNAME": "eth1"}))
    (found,) = compare({"a": have, "b": have, "c": lack})
    assert (found.subject, found.status, found.stops) == ("NCCL_ALGO", Status.DEGRADED, False)
    assert "(not set) on c" in found.evidence


def test_settings_that_differ_are_named():
    """Those that somebody set; a role of one node is its own."""
    first = list(shared.settings(Settings(heartbeat_timeout="10min", straggler_role="encoder")))
    second = list(shared.settings(Settings(straggler_role="decoder")))
    (found,) = compare({"a": first, "b": second})
    assert found.subject == "heartbeat_timeout"
    assert "600" in found.evidence
    assert "--config" in found.cure


def test_a_node_that_could_not_be_looked_at_is_not_odd():
    """Its own probe says so already."""
    nothing = Finding(probe="software", check="torch", status=Status.UNAVAILABLE, evidence="hangs")
    assert compare({"a": [torch("2.6.0")], "b": [nothing]}) == []


@given(st.dictionaries(st.text(min_size=1), st.sampled_from(["2.5.1", "2.6.0", "2.7.0"]), min_size=1, max_size=20))
def test_odd_ones_differ_from_more_than_half(nodes):
    """And every node stands beside its own value."""
    found = compare({node: [torch(version)] for node, version in nodes.items()})
    assert bool(found) is (len(set(nodes.values())) > 1)
    for finding in found:
        assert finding.data["values"] == nodes
        odd = finding.data["odd"]
        assert 2 * len(odd) < len(nodes)
        usual = {nodes[node] for node in nodes if node not in odd}
        assert not odd or len(usual) == 1
