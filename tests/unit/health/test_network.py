"""Ports, interfaces and names, from files in the form of /sys/class and with real sockets on this machine."""

import errno
import socket

import pytest

from resilience_sdk.health import network, probes
from resilience_sdk.health.findings import Status
from resilience_sdk.health.network import chosen_interfaces, interface_findings, interfaces, reach, reach_finding
from resilience_sdk.health.probes import Context


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
    return {(f.check, f.subject): f for f in network.port_findings(root)}


def test_active_ports_are_in_order(machine):
    """Counters at rest and a cable's few symbol errors are no fault; nor is a machine without fabric."""
    assert findings(machine)["rdma", ""].status is Status.UNAVAILABLE
    found = findings(machine, port("mlx5_0", symbol_error=3, link_downed=0), port("mlx5_1"))
    assert {finding.status for finding in found.values()} == {Status.OK}
    assert found["rdma_port", "mlx5_0 port 1"].value == 400


@pytest.mark.parametrize(
    ("what", "status"),
    [
        # Nobody uses it; or it is linked and not active: the subnet manager does not answer, or the link breaks.
        ({"state": "1: DOWN", "physical": "3: Disabled"}, Status.OK),
        ({"state": "1: DOWN", "physical": "2: Polling"}, Status.OK),
        ({"state": "2: INIT", "physical": "5: LinkUp"}, Status.FAILED),
        ({"state": "1: DOWN", "physical": "6: LinkErrorRecovery"}, Status.FAILED),
        ({"rate": "200 Gb/sec (4X HDR)"}, Status.DEGRADED),  # its cable trained at less
    ],
)
def test_a_port_beside_an_active_one(machine, what, status):
    """Without the other one NCCL would fall back to TCP, and be slow without a word."""
    found = findings(machine, port("mlx5_0"), port("mlx5_1", **what))
    assert found["rdma_port", "mlx5_0 port 1"].status is Status.OK
    assert found["rdma_port", "mlx5_1 port 1"].status is status
    assert found["rdma_port", "mlx5_1 port 1"].threshold == 400
    alone = findings(machine, port("mlx5_0", state="1: DOWN"), port("mlx5_1", **what))["rdma", ""]
    assert (alone.status is Status.FAILED) is ("ibstat" in alone.cure) is ("state" in what)


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
    """A link that went down did so for a reason; packets are sent again all the time, also during a run."""
    found = findings(machine, port("mlx5_0", **counters))[check, "mlx5_0 port 1"]
    assert (found.status, found.value, found.data["counters"]) == (status, sum(counters.values()), counters)
    assert next(iter(counters)) in found.evidence
    assert found.data["growth"]["per_minute"] == (0 if check == "rdma_link_errors" else 100)


def interface(name, state="up", flaps=0, packets=10**9, is_real=True, carrier=1, speed=100_000, **errors):
    """Return the files of an interface."""
    files = {"operstate": state, "carrier": carrier, "carrier_down_count": flaps, "speed": speed}
    files |= {"statistics/rx_packets": packets, "statistics/tx_packets": packets}
    files |= {f"statistics/{error}": count for error, count in errors.items()}
    if is_real:
        files["device/vendor"] = "0x15b3"
    return {f"/sys/class/net/{name}/{file}": f"{text}\n" for file, text in files.items()}


def look(machine, *parts):
    """Return the interfaces of a machine that has these."""
    return interfaces(machine({name: text for part in parts for name, text in part.items()}))


LOOPBACK = interface("lo", is_real=False)


def test_only_interfaces_with_a_device_are_judged(machine):
    """Loopback and bridges are not; with a free port nothing is wrong."""
    bridge, free = interface("docker0", is_real=False, flaps=900), interface("eth1", state="down", carrier=0, flaps=900)
    found = look(machine, LOOPBACK, bridge, interface("eth0"), free, {"/sys/class/net/bonding_masters": "\n"})
    used, free = interface_findings(found)
    assert (used.subject, used.status, used.evidence) == ("eth0", Status.OK, "up, 100000 Mb/s")
    assert (free.subject, free.status, free.value) == ("eth1", Status.OK, None)
    assert "lo" in interfaces("/")  # the real files are in the form that is read


@pytest.mark.parametrize(
    ("what", "status", "word"),
    [
        ({"flaps": 17}, Status.DEGRADED, "17 times"),  # each costs a collective seconds, or its life
        ({"rx_crc_errors": 100}, Status.OK, "up"),  # a hundred in two billions are nothing
        ({"rx_crc_errors": 1_000_000}, Status.DEGRADED, "rx_crc_errors"),
    ],
)
def test_a_link_that_flaps_or_loses_packets(machine, what, status, word):
    """Bad packets count by their share."""
    (found,) = interface_findings(look(machine, interface("eth0", **what)))
    assert found.status is status
    assert word in found.evidence


NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("variable", "value", "takes"),
    [
        # NCCL takes prefixes, gloo full names.
        (NCCL, "eth", "eth0, eth1"),
        (NCCL, "=eth1", "eth1"),
        (NCCL, "^lo,down,docker", "eth0, eth1"),
        (NCCL, "^=lo,down0", "eth0, eth1"),
        (GLOO, "eth0", "eth0"),
        (GLOO, "eth0,eth1", "eth0, eth1"),
        # What is not there or down stops the job: the library's own error would name none of those there are.
        *((NCCL, value, None) for value in ("ib", "=eth", "down0")),
        *((GLOO, value, None) for value in ("eth", "eth0,ib0", "down0")),
    ],
)
def test_the_interfaces_of_the_job_are_read_as_the_libraries_do(machine, variable, value, takes):
    """With the names of those there are, where they are not."""
    there = (interface("eth0"), interface("eth1"), LOOPBACK, interface("down0", state="down"))
    (chosen,) = chosen_interfaces(look(machine, *there), {variable: value})
    why = "is down" if value == "down0" else "there are: down0, eth0, eth1, lo"
    assert chosen.stops is (takes is None)
    assert chosen.evidence.endswith(f"takes {takes}" if takes else why)
    assert (f"unset {variable}" in chosen.cure) is chosen.stops


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
    assert network.split_endpoint(endpoint) == (host, port)


@pytest.mark.parametrize("endpoint", ["", ":29500", "node:http", "node:70000", "node:-1"])
def test_a_bad_endpoint_is_an_error(endpoint):
    """Which names what was given."""
    with pytest.raises(ValueError, match="expected host:port"):
        network.split_endpoint(endpoint)


OWN = socket.gethostname()
HERE = ("localhost", "127.0.0.1", "[::1]", "127.0.1.1", OWN, OWN.upper(), f"{OWN}.cluster")
LOOP, FAR = ["127.0.1.1"], ["192.0.2.7"]  # the second one is nobody's here


@pytest.mark.parametrize(
    ("endpoint", "resolved", "own", "nodes", "env", "expected"),
    [
        # A loopback address is wrong only between nodes: there every node would talk to itself. Several launchers on
        # one machine may share its name, to which Debian gives one.
        ("node-1:1", LOOP, FAR, 1, {}, {"resolves": "ok", "own_name": "ok"}),
        ("node-1:1", LOOP, FAR, 2, {}, {"resolves": "failed", "own_name": "ok"}),
        *((f"{host}:0", LOOP, LOOP, 2, {GLOO: "e"}, {"resolves": "degraded"}) for host in HERE),
        # The own name is asked for by gloo, unless its interface is chosen, and surely by a job that is elsewhere.
        ("node-1:1", FAR, LOOP, 2, {}, {"resolves": "ok", "own_name": "failed"}),
        ("node-1:1", FAR, LOOP, 2, {NCCL: "e"}, {"resolves": "ok", "own_name": "degraded"}),
        ("node-1:1", FAR, LOOP, 2, {GLOO: "e"}, {"resolves": "ok"}),
        (None, [], LOOP, 2, {}, {"resolves": "unavailable", "own_name": "degraded"}),
        (None, [], [], 1, {}, {"resolves": "unavailable", "own_name": "degraded"}),
        ("node-1:1", [], FAR, 1, {}, {"resolves": "failed", "own_name": "ok"}),
    ],
)
def test_names(monkeypatch, endpoint, resolved, own, nodes, env, expected):
    """What must be good stops the job; the cure is another name, or an interface."""
    monkeypatch.setattr(network, "addresses", lambda name: own if name == OWN else resolved)
    monkeypatch.setattr(network, "host_name", lambda: OWN)
    monkeypatch.setattr(network, "REACH_TIMEOUT_S", 0.01)
    context = Context(rendezvous=endpoint, environment=env, nodes=nodes)
    found = {finding.check: finding for finding in network.names(context)}
    assert ("reach" in found) is bool(endpoint and resolved)
    found.pop("reach", None)
    assert {check: finding.status.value for check, finding in found.items()} == expected
    for check, word in (("resolves", "MASTER_ADDR"), ("own_name", "GLOO_SOCKET_IFNAME")):
        assert check not in found or (word in found[check].cure) is found[check].is_bad
        assert check not in found or found[check].stops is (found[check].status is Status.FAILED)


def test_a_name_that_nobody_has_does_not_resolve():
    """`.invalid` never does (RFC 6761)."""
    found = next(network.names(Context(rendezvous="no-such-node.invalid:29500")))
    assert (found.subject, found.stops) == ("no-such-node.invalid", True)


@pytest.mark.parametrize(
    ("listens", "before_start", "status", "word"),
    [
        (True, False, Status.OK, "somebody listens"),  # from a rank, whose launcher is there already
        (True, True, Status.DEGRADED, "before the job has begun"),  # it would end with "address already in use"
        (False, True, Status.OK, "nobody listens yet"),  # that its machine refuses shows that it can be reached
    ],
)
def test_the_way_to_a_rendezvous(monkeypatch, listens, before_start, status, word):
    """It is measured, and a port that is taken is told."""
    monkeypatch.setattr(probes.Probe, "limit", lambda *_: 10.0)  # a busy machine takes its time
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        found = reach("localhost", server.getsockname()[1], ["127.0.0.1"], before_start=before_start)
    assert (found.status, found.unit, 0 < found.value < 10) == (status, "s", True)
    assert word in found.evidence


@pytest.mark.parametrize(
    ("took_s", "error", "status", "why"),
    [
        # Firewalls drop, routers refuse; of several tries one that was late does not count.
        ([], TimeoutError(), Status.FAILED, "no answer within 1 s"),
        ([], OSError(errno.EHOSTUNREACH, "No route to host"), Status.FAILED, "No route to host"),
        ([0.0001, 0.0002, 0.9], None, Status.OK, "0.2 ms"),
        ([0.05, 0.06, 0.07], None, Status.DEGRADED, "60 ms"),
    ],
)
def test_a_rendezvous_that_is_far_or_cannot_be_reached(took_s, error, status, why):
    """What cannot be reached stops the job."""
    found = reach_finding("node-1", 29500, took_s, error, is_open=True, is_taken=False)
    assert (found.status, found.stops) == (status, error is not None)
    assert why in found.evidence
    assert error is None or "29500" in found.cure


@pytest.mark.parametrize(("address", "here"), [("127.0.0.1", True), ("192.0.2.7", False), ("2001:db8::7", False)])
def test_only_our_own_addresses_can_be_bound(address, here):
    """Addresses for documentation are nobody's."""
    assert network.is_here([address]) is here
