"""Names and the way to the rendezvous, with real sockets on this machine."""

import errno
import socket

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.network import rendezvous
from resilience_sdk.health.network.probe import names
from resilience_sdk.health.probes import Context


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("node-1:1234", "node-1", 1234),
        ("node-1", "node-1", 29500),
        ("localhost:0", "localhost", 29500),
        ("[::1]:80", "::1", 80),
        ("::1", "::1", 29500),
        ("10.0.0.1:", "10.0.0.1", 29500),
    ],
)
def test_endpoints_are_read_as_torch_does(endpoint, host, port):
    """Without a port it is torch's default."""
    assert rendezvous.split_endpoint(endpoint) == (host, port)


@pytest.mark.parametrize("endpoint", ["", ":29500", "node:http", "node:70000", "node:-1"])
def test_a_bad_endpoint_is_an_error(endpoint):
    """Which names what was given."""
    with pytest.raises(ValueError, match="expected host:port"):
        rendezvous.split_endpoint(endpoint)


def test_a_name_that_does_not_resolve_stops_the_job():
    """`.invalid` never does (RFC 6761)."""
    found = list(names(Context(rendezvous="no-such-node.invalid:29500")))
    (bad,) = [finding for finding in found if finding.check == "resolves"]
    assert bad.stops
    assert bad.subject == "no-such-node.invalid"
    assert "MASTER_ADDR" in bad.cure
    assert not [finding for finding in found if finding.check == "reach"]


def test_a_loopback_address_is_wrong_only_between_nodes():
    """There every node would talk to itself, and all would wait for each other."""
    alone, _ = rendezvous.name_finding("resolves", "node-1", lambda _: ["127.0.1.1"], elsewhere=False, must=True)
    between, _ = rendezvous.name_finding("resolves", "node-1", lambda _: ["127.0.1.1"], elsewhere=True, must=True)
    assert (alone.status, alone.cure) == (Status.OK, "")
    assert between.stops
    assert "reach themselves" in between.evidence


def names_of(endpoint, env=(), nodes=2):
    """Return by check what is said of the names of a job on several nodes."""
    context = Context(rendezvous=endpoint, environment=dict(env), nodes=nodes)
    return {finding.check: finding for finding in names(context)}


OWN = socket.gethostname()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "127.0.1.1", OWN, OWN.upper(), f"{OWN}.cluster"])
def test_a_name_that_may_have_a_loopback_address_stops_nothing(host, monkeypatch):
    """Several launchers on one machine; and Debian gives one to the machine's own name, which only here has it."""
    monkeypatch.setattr(rendezvous, "addresses", lambda _: ["127.0.1.1"])
    found = names_of(f"{host}:0", {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"})
    assert found["resolves"].status is Status.DEGRADED
    assert "all launchers are here" in found["resolves"].evidence
    assert "MASTER_ADDR" in found["resolves"].cure
    assert not [finding for finding in found.values() if finding.stops]


def test_another_nodes_name_with_a_loopback_address_stops_the_job(monkeypatch):
    """There this node would wait for itself."""
    monkeypatch.setattr(rendezvous, "addresses", lambda _: ["127.0.1.1"])
    assert names_of("surely-not-this-one:29500")["resolves"].stops


@pytest.mark.parametrize(
    ("endpoint", "env", "status"),
    [
        ("192.0.2.7:1", {}, Status.FAILED),  # nobody here has this address
        ("192.0.2.7:1", {"NCCL_SOCKET_IFNAME": "eth0"}, Status.DEGRADED),  # it may do without gloo
        ("192.0.2.7:1", {"GLOO_SOCKET_IFNAME": "eth0"}, None),
        ("127.0.0.1:1", {}, Status.DEGRADED),  # all may be on this machine
        (None, {}, Status.DEGRADED),
    ],
)
def test_own_name_stops_a_job_only_where_it_surely_needs_it(endpoint, env, status, monkeypatch):
    """Gloo does not ask for it where the interface is chosen."""
    monkeypatch.setattr(rendezvous, "addresses", lambda name: ["127.0.1.1"] if name == OWN else [name])
    monkeypatch.setattr(rendezvous, "REACH_TIMEOUT_S", 0.01)
    own = names_of(endpoint, env).get("own_name")
    assert (own and own.status) == status
    assert own is None or own.stops is (status is Status.FAILED)
    assert own is None or "GLOO_SOCKET_IFNAME" in own.cure


def test_own_name_of_one_node_is_a_warning():
    """Nobody else asks for it."""
    args = ("this-node.invalid", rendezvous.addresses)
    (alone,) = rendezvous.own_name(*args, elsewhere=False, must=False, chosen=False)
    assert alone.status is Status.DEGRADED


@pytest.fixture
def not_slow(monkeypatch):
    """A machine that is busy with other things takes more than ten milliseconds for anything."""
    monkeypatch.setattr(rendezvous, "SLOW_REACH_S", 10.0)


@pytest.fixture
def listener(not_slow):
    """Yield the port of a socket on this machine that accepts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_rendezvous_that_answers_is_measured(listener):
    """From a rank, whose launcher is there already."""
    found = rendezvous.reach("localhost", listener, ["127.0.0.1"], before_start=False)
    assert (found.status, found.unit) == (Status.OK, "s")
    assert 0 < found.value < 10
    assert "somebody listens" in found.evidence


def test_a_port_that_is_taken_before_the_job_is_told(listener):
    """It would end with "address already in use"."""
    found = rendezvous.reach("localhost", listener, ["127.0.0.1"], before_start=True)
    assert found.status is Status.DEGRADED
    assert "choose another port" in found.cure


def test_nobody_listens_before_a_job(not_slow):
    """That its machine refuses shows that it can be reached."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = rendezvous.reach("localhost", free.getsockname()[1], ["127.0.0.1"], before_start=True)
    assert found.status is Status.OK
    assert "nobody listens yet" in found.evidence


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (TimeoutError(), "no answer within 1 s"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "No route to host"),
    ],
)
def test_a_machine_that_cannot_be_reached_stops_the_job(error, why):
    """Firewalls drop, routers refuse."""
    found = rendezvous.reach_finding("node-1", 29500, [], error, is_open=False, is_taken=False)
    assert found.stops
    assert why in found.evidence
    assert "29500" in found.cure


def test_a_far_rendezvous_is_slow():
    """The median of the tries, so that one that was late does not count."""
    near = rendezvous.reach_finding("n", 1, [0.0001, 0.0002, 0.9], None, is_open=True, is_taken=False)
    far = rendezvous.reach_finding("n", 1, [0.05, 0.06, 0.07], None, is_open=True, is_taken=False)
    assert (near.status, far.status) == (Status.OK, Status.DEGRADED)


@pytest.mark.parametrize(("address", "here"), [("127.0.0.1", True), ("192.0.2.7", False), ("2001:db8::7", False)])
def test_only_our_own_addresses_can_be_bound(address, here):
    """Addresses for documentation are nobody's."""
    assert rendezvous.is_here([address]) is here
