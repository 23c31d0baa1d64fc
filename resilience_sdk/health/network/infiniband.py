"""Ports of InfiniBand and RoCE devices, from /sys/class/infiniband: state, rate, and error counters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from resilience_sdk import kernel_files
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import judged

PROBE = "network"
ACTIVE = "ACTIVE"
# Counters of faults, by name under `counters/` and `hw_counters/`, and how many are no sign of one. A link that went
# down or was trained again did so for a reason; cables make a few symbol errors in their life, congestion retries.
LINK_ERRORS = {
    "link_downed": 0,
    "link_error_recovery": 0,
    "local_link_integrity_errors": 0,
    "excessive_buffer_overrun_errors": 0,
}
PACKET_ERRORS = {
    "port_rcv_errors": 10,
    "symbol_error": 100,
    "VL15_dropped": 100,
    "local_ack_timeout_err": 1000,
    "out_of_sequence": 100_000,
    "packet_seq_err": 100_000,
    "rnr_nak_retry_err": 1000,
    "roce_adp_retrans_to": 1000,
}
MOST_ERRORS = LINK_ERRORS | PACKET_ERRORS
MOST_PACKET_ERRORS_PER_MINUTE = 100


@attrs.frozen
class Port:
    """One port of an RDMA device. `rate_gbps` is what it runs at now."""

    device: str
    number: str
    state: str  # DOWN, INIT, ARMED, ACTIVE
    physical: str  # Disabled, Polling, LinkUp, ...
    layer: str  # InfiniBand or Ethernet (RoCE)
    rate_gbps: float | None
    counters: dict[str, int]

    @property
    def name(self) -> str:
        """Name it as `ibstat` does."""
        return f"{self.device} port {self.number}"

    @property
    def is_off(self) -> bool:
        """Tell whether it was switched off, or nothing is plugged in: nobody means to use it."""
        return self.state != ACTIVE and self.physical in ("Disabled", "Polling", "Sleep")


def ports(root: str) -> list[Port]:
    """Return every port of every device."""
    found = []
    for device in kernel_files.entries(kernel_files.below(root, "/sys/class/infiniband")):
        for port in kernel_files.entries(device / "ports"):
            counters = {
                name: count
                for folder in ("counters", "hw_counters")
                for name in MOST_ERRORS
                if (count := kernel_files.number(port / folder / name)) is not None
            }
            found.append(
                Port(
                    device=device.name,
                    number=port.name,
                    state=_after_colon(port / "state"),
                    physical=_after_colon(port / "phys_state"),
                    layer=kernel_files.text(port / "link_layer") or "",
                    rate_gbps=_rate(kernel_files.text(port / "rate") or ""),
                    counters=counters,
                )
            )
    return found


def port_findings(found: Sequence[Port]) -> Iterator[Finding]:
    """Yield whether any port of the node works, and what is said of each. Pure."""
    if not found:
        yield Finding(
            probe=PROBE,
            check="rdma",
            status=Status.UNAVAILABLE,
            evidence="no InfiniBand or RoCE device here",
        )
        return
    active = sum(port.state == ACTIVE for port in found)
    yield judged(
        probe=PROBE,
        check="rdma",
        status=Status.OK if active else Status.FAILED,
        value=active,
        unit="active ports",
        threshold=1,
        evidence=f"{active} of {len(found)} ports are active"
        if active
        else f"none of {len(found)} ports is active: NCCL falls back to TCP, or fails",
        cure="check cables and the subnet manager (`ibstat`, `ibdiagnet`), or leave this node out",
    )
    best = max((port.rate_gbps or 0.0 for port in found if port.state == ACTIVE), default=0.0)
    for port in found:
        yield from _port(port, best)


def _port(port: Port, best_gbps: float) -> Iterator[Finding]:
    # Of ports that nobody means to use nothing is wrong: machines have more than they have cables.
    status = Status.OK if port.state == ACTIVE or port.is_off else Status.FAILED
    evidence, cure = f"{port.state}, {port.physical}", f"`ibstat {port.device}`, reseat or replace the cable, or drain"
    if port.state == ACTIVE and port.rate_gbps is not None:
        evidence = f"{port.state} at {port.rate_gbps:g} Gb/s"
        if port.rate_gbps < best_gbps:
            status = Status.DEGRADED
            evidence += f", another port of this node runs at {best_gbps:g}"
            cure = f"reset or replace the cable (`ibstat {port.device}`): it trained at less than its rate"
    yield judged(
        probe=PROBE,
        check="rdma_port",
        subject=port.name,
        status=status,
        value=port.rate_gbps if port.state == ACTIVE else port.state,
        unit="Gb/s" if port.state == ACTIVE and port.rate_gbps is not None else "",
        threshold=best_gbps or None,
        evidence=f"{port.layer}: {evidence}" if port.layer else evidence,
        cure=cure,
        data={"works": port.state == ACTIVE, "state": port.state, "lost": cure},
    )
    yield from _errors(port, "rdma_link_errors", LINK_ERRORS, growth_per_minute=0)
    yield from _errors(port, "rdma_packet_errors", PACKET_ERRORS, growth_per_minute=MOST_PACKET_ERRORS_PER_MINUTE)


def _errors(port: Port, check: str, limits: dict[str, int], growth_per_minute: int) -> Iterator[Finding]:
    """Yield what a group of counters says; nothing where the device has none of them."""
    counts = {name: port.counters[name] for name in limits if name in port.counters}
    if not counts:
        return
    bad = {name: count for name, count in counts.items() if count > limits[name]}
    told = ", ".join(f"{name} {count}" for name, count in (bad or counts).items())
    cure = "see whether they grow (`perfquery -x`, then once more): if so, replace the cable or drain"
    yield judged(
        probe=PROBE,
        check=check,
        subject=port.name,
        status=Status.DEGRADED if bad else Status.OK,
        value=sum(counts.values()),
        unit="errors",
        evidence=f"since the counters were reset: {told}",
        cure=cure,
        data={"counters": counts, "growth": {"per_minute": growth_per_minute, "cure": cure}},
    )


def _after_colon(path: Path) -> str:
    """Return ACTIVE of `4: ACTIVE`."""
    return (kernel_files.text(path) or "").partition(":")[2].strip()


def _rate(text: str) -> float | None:
    """Return 400 of `400 Gb/sec (4X NDR)`."""
    match = re.match(r"([\d.]+)\s*Gb", text)
    return float(match[1]) if match else None
