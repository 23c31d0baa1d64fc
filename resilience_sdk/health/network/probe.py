"""The probes of the network; each runs in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.job import has_nodes_elsewhere
from resilience_sdk.health.network import infiniband, interfaces, rendezvous
from resilience_sdk.health.probes import Context
from resilience_sdk.hostinfo import host_name


def devices(context: Context) -> Iterator[Finding]:
    """Yield the state of fabric ports and interfaces."""
    found = interfaces.interfaces(context.root)
    yield from interfaces.chosen_interfaces(found, context.environment)
    yield from interfaces.interface_findings(found)
    yield from infiniband.port_findings(infiniband.ports(context.root))


def names(context: Context) -> Iterator[Finding]:
    """Yield whether names resolve and the rendezvous can be reached. The resolver may hang."""
    elsewhere = has_nodes_elsewhere(context)
    if not context.rendezvous:
        yield from _own_name(context, elsewhere=elsewhere, other_machines=False)
        yield Finding(
            probe=rendezvous.PROBE,
            check="resolves",
            status=Status.UNAVAILABLE,
            evidence="no rendezvous is named (MASTER_ADDR and MASTER_PORT, or --rendezvous): one node needs none",
        )
        return
    host, port = rendezvous.split_endpoint(context.rendezvous)
    finding, found = rendezvous.name_finding(
        "resolves",
        host,
        rendezvous.addresses,
        elsewhere=elsewhere,
        must=True,
        may_be_here=rendezvous.is_of_this_machine,
    )
    yield finding
    yield from _own_name(context, elsewhere=elsewhere, other_machines=rendezvous.is_elsewhere(found))
    if found:
        yield rendezvous.reach(host, port, found, before_start="RANK" not in context.environment)


def _own_name(context: Context, *, elsewhere: bool, other_machines: bool) -> Iterator[Finding]:
    """Yield what is said of this machine's name; it stops a job only where that surely cannot do without it.

    `other_machines`: the job's nodes are not all on this one, for sure; launchers may be several on one machine.
    """
    env = context.environment
    is_chosen, is_nccls = bool(env.get("GLOO_SOCKET_IFNAME")), bool(env.get("NCCL_SOCKET_IFNAME"))
    must = elsewhere and other_machines and not is_nccls
    yield from rendezvous.own_name(host_name(), rendezvous.addresses, elsewhere=elsewhere, must=must, chosen=is_chosen)
