"""Network interfaces, from files in the form of /sys/class/net."""

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.network import interfaces


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
    return interfaces.interfaces(machine({name: text for part in parts for name, text in part.items()}))


def test_only_interfaces_with_a_device_are_judged(machine):
    """Loopback and bridges are not; with a free port nothing is wrong."""
    found = look(
        machine,
        interface("lo", is_real=False),
        interface("docker0", is_real=False, flaps=900),
        interface("eth0"),
        interface("eth1", state="down", carrier=0, flaps=900),
        {"/sys/class/net/bonding_masters": "\n"},
    )
    used, free = interfaces.interface_findings(found)
    assert (used.subject, used.status, used.evidence) == ("eth0", Status.OK, "up, 100000 Mb/s")
    assert (free.subject, free.status, free.value) == ("eth1", Status.OK, None)


def test_a_link_that_flaps(machine):
    """Each time costs a collective seconds, or its life."""
    (found,) = interfaces.interface_findings(look(machine, interface("eth0", flaps=17)))
    assert (found.status, found.value) == (Status.DEGRADED, 17)
    assert "17 times" in found.evidence


@pytest.mark.parametrize(("errors", "status"), [(100, Status.OK), (1_000_000, Status.DEGRADED)])
def test_bad_packets_count_by_their_share(machine, errors, status):
    """A hundred in two billions are nothing."""
    (found,) = interfaces.interface_findings(look(machine, interface("eth0", rx_crc_errors=errors)))
    assert found.status is status
    assert ("rx_crc_errors" in found.evidence) is (status is Status.DEGRADED)


NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("variable", "value", "takes"),
    [
        (NCCL, "eth", "eth0, eth1"),
        (NCCL, "=eth1", "eth1"),
        (NCCL, "^lo,docker", "eth0, eth1"),
        (NCCL, "^=lo", "eth0, eth1"),
        (GLOO, "eth0", "eth0"),
        (GLOO, "eth0,eth1", "eth0, eth1"),
    ],
)
def test_the_interfaces_of_the_job_are_read_as_the_libraries_do(machine, variable, value, takes):
    """NCCL takes prefixes, gloo full names."""
    found = look(machine, interface("eth0"), interface("eth1"), interface("lo", is_real=False))
    (chosen,) = interfaces.chosen_interfaces(found, {variable: value})
    assert chosen.status is Status.OK
    assert chosen.evidence.endswith(f"takes {takes}")


@pytest.mark.parametrize(("variable", "value"), [(NCCL, "ib"), (NCCL, "=eth"), (GLOO, "eth"), (GLOO, "eth0,ib0")])
def test_an_interface_that_is_not_there_stops_the_job(machine, variable, value):
    """It would end with an error of the library that names none of those there are."""
    (found,) = interfaces.chosen_interfaces(look(machine, interface("eth0")), {variable: value})
    assert found.stops
    assert "there are: eth0" in found.evidence
    assert f"unset {variable}" in found.cure


def test_an_interface_that_is_down_stops_the_job(machine):
    """Nothing can be sent."""
    (found,) = interfaces.chosen_interfaces(look(machine, interface("eth0", state="down")), {GLOO: "eth0"})
    assert found.stops
    assert "is down" in found.evidence


def test_this_machine_has_interfaces():
    """The real files are in the form that is read."""
    assert "lo" in {found.name for found in interfaces.interfaces("/")}
