"""The probes of the network: fabric ports, interfaces, names, and the way to the rendezvous."""

from __future__ import annotations

import errno
import re
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from resilience_sdk.health.findings import Finding, Status, high
from resilience_sdk.health.probes import NETWORK, RENDEZVOUS, Context
from resilience_sdk.system import procfs
from resilience_sdk.system.hostinfo import host_name

NCCL_INTERFACE, GLOO_INTERFACE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


def devices(context: Context) -> Iterator[Finding]:
    """Yield the state of fabric ports and interfaces."""
    found = interfaces(context.root)
    yield from chosen_interfaces(found, context.environment)
    yield from interface_findings(found)
    yield from port_findings(context.root)


ACTIVE = "ACTIVE"
# Nobody means to use a port that was switched off, or into which nothing is plugged.
_OFF = frozenset({"Disabled", "Polling", "Sleep"})
# Counters of faults, by name under `counters/` and `hw_counters/`, and how many are no sign of one. A link that went
# down or was trained again did so for a reason; cables make a few symbol errors in their life, congestion retries.
COUNTERS = {
    "rdma_link_errors": {
        "link_downed": 0,
        "link_error_recovery": 0,
        "local_link_integrity_errors": 0,
        "excessive_buffer_overrun_errors": 0,
    },
    "rdma_packet_errors": {
        "port_rcv_errors": 10,
        "symbol_error": 100,
        "VL15_dropped": 100,
        "local_ack_timeout_err": 1000,
        "out_of_sequence": 100_000,
        "packet_seq_err": 100_000,
        "rnr_nak_retry_err": 1000,
        "roce_adp_retrans_to": 1000,
    },
}


def port_findings(root: str) -> Iterator[Finding]:
    """Yield whether any fabric port of the node works, and what is said of each: its link, and its error counters."""
    found = {
        f"{device.name} port {port.name}": port  # as `ibstat` has it
        for device in procfs.entries(procfs.below(root, "/sys/class/infiniband"))
        for port in procfs.entries(device / "ports")
    }
    if not found:
        yield NETWORK.found("rdma", Status.UNAVAILABLE, "no InfiniBand or RoCE device here")
        return
    rates = [_rate(port) or 0.0 for port in found.values() if _state(port) == ACTIVE]
    if rates:
        yield NETWORK.found("rdma", Status.OK, f"{len(rates)} of {len(found)} ports are active", len(rates))
    else:
        evidence = f"none of {len(found)} ports is active: NCCL falls back to TCP, or fails"
        yield NETWORK.found("rdma", Status.FAILED, evidence, 0)
    for name, port in found.items():
        yield _link(name, port, max(rates, default=0.0))
        yield from _errors(name, port)


def _state(port: Path) -> str:
    """Return ACTIVE of `4: ACTIVE`; others are DOWN, INIT and ARMED."""
    return (procfs.text(port / "state") or "").partition(": ")[2]


def _rate(port: Path) -> float | None:
    """Return what a port runs at now in Gb/s: 400 of `400 Gb/sec (4X NDR)`."""
    match = re.match(r"([\d.]+)\s*Gb", procfs.text(port / "rate") or "")
    return float(match[1]) if match else None


def _link(name: str, port: Path, best_gbps: float) -> Finding:
    state, rate, layer = _state(port), _rate(port), procfs.text(port / "link_layer")
    physical = (procfs.text(port / "phys_state") or "").partition(": ")[2]
    is_active = state == ACTIVE
    # Of ports that nobody means to use nothing is wrong: machines have more than they have cables.
    status = Status.OK if is_active or physical in _OFF else Status.FAILED
    shown = f"`ibstat {name.partition(' ')[0]}`"
    evidence, cure = f"{state}, {physical}", f"{shown}, reseat or replace the cable, or drain"
    if is_active and rate is not None:
        evidence = f"{state} at {rate:g} Gb/s"
        if rate < best_gbps:
            status = Status.DEGRADED
            evidence += f", another port of this node runs at {best_gbps:g}"
            cure = f"reset or replace the cable ({shown}): it trained at less than its rate"
    return NETWORK.found(
        "rdma_port",
        status,
        f"{layer}: {evidence}" if layer else evidence,
        rate if is_active else state,
        subject=name,
        unit="Gb/s" if is_active else "",
        limit=best_gbps or None,
        cure=cure,
        data={"works": is_active, "state": state},
    )


def _errors(name: str, port: Path) -> Iterator[Finding]:
    """Yield what each group of counters says; nothing of those that the device does not have."""
    for check, limits in COUNTERS.items():
        found = {each: _counter(port, each) for each in limits}
        counts = {each: count for each, count in found.items() if count is not None}
        bad = {each: count for each, count in counts.items() if count > limits[each]}
        if counts:
            told = ", ".join(f"{each} {count}" for each, count in (bad or counts).items())
            status, evidence = high(len(bad), degraded=0), f"since the counters were reset: {told}"
            yield NETWORK.found(check, status, evidence, sum(counts.values()), subject=name, data={"counters": counts})


def _counter(port: Path, name: str) -> int | None:
    count = procfs.number(port / "counters" / name)
    return procfs.number(port / "hw_counters" / name) if count is None else count


# A cable within the Ethernet standards loses less than one packet in ten million; this is ten times that.
MAX_ERROR_SHARE = 1e-6
_ERRORS = ("rx_crc_errors", "rx_errors", "tx_errors", "tx_carrier_errors")


def interfaces(root: str) -> dict[str, Path]:
    """Return the directory of each interface, by its name."""
    found = procfs.entries(procfs.below(root, "/sys/class/net"))
    return {entry.name: entry for entry in found if entry.is_dir()}  # the bonding driver's switch there is a file


def interface_findings(found: Mapping[str, Path]) -> Iterator[Finding]:
    """Yield what is said of each interface that has a device behind it, so that it is neither a bridge nor a tunnel.

    Without a link nothing is wrong with it: nobody means to use it, unless it `works` at another look.
    """
    for name, entry in found.items():
        if not (entry / "device").exists():
            continue
        if procfs.number(entry / "carrier") == 1:
            yield _interface(name, entry)
        else:
            evidence = f"no link: {_operation(entry)}, no cable, or nothing at its other end"
            cure = f"see the cable, the switch and `dmesg | grep {name}`"
            yield NETWORK.found("interface", Status.OK, evidence, subject=name, cure=cure, data={"works": False})


def _operation(entry: Path) -> str:
    """Return up, down, unknown, ..."""
    return procfs.text(entry / "operstate") or "unknown"


def _interface(name: str, entry: Path) -> Finding:
    flaps, speed = procfs.number(entry / "carrier_down_count") or 0, procfs.number(entry / "speed") or 0
    counts = {each: procfs.number(entry / "statistics" / each) for each in (*_ERRORS, "rx_packets", "tx_packets")}
    errors = {error: count for error in _ERRORS if (count := counts[error]) is not None}
    share = sum(errors.values()) / max(1, (counts["rx_packets"] or 0) + (counts["tx_packets"] or 0))
    problems = []
    if flaps > NETWORK.limit("interface"):
        problems.append(f"its link went down {flaps} times since the machine started")
    if share > MAX_ERROR_SHARE:
        told = ", ".join(f"{error} {count}" for error, count in errors.items() if count)
        problems.append(f"{share:.2g} of its packets were bad ({told})")
    cure = (
        f"see whether it goes on (`ip -s link show {name}`, `dmesg | grep {name}`): reseat or replace cable and "
        "transceiver, or leave this node out"
    )
    return NETWORK.found(
        "interface",
        Status.DEGRADED if problems else Status.OK,
        "; ".join(problems) or f"{_operation(entry)}, {f'{speed} Mb/s' if speed > 0 else 'speed not told'}",
        flaps,
        subject=name,
        cure=cure,
        data={"works": True, "errors": errors, "speed_mbps": speed if speed > 0 else None},
    )


def chosen_interfaces(found: Mapping[str, Path], env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether the interfaces that the job's variables choose are there and up."""
    for variable, choose in ((NCCL_INTERFACE, _nccl_choice), (GLOO_INTERFACE, _gloo_choice)):
        value = env.get(variable, "").strip()
        if not value:
            continue
        chosen = choose(value, found)
        status, evidence = Status.FAILED, f"{variable}={value}, which is down"
        if chosen is None:
            evidence = f"{variable}={value}, and there is no such interface; there are: {', '.join(found)}"
        elif not chosen or any(_operation(found[name]) != "down" for name in chosen):
            status, evidence = Status.OK, f"{variable}={value} takes {', '.join(chosen)}"
        cure = f"name one that every node has and that is up (`ip -br addr`), or unset {variable}"
        yield NETWORK.found("chosen_interface", status, evidence, value, subject=variable, cure=cure)


def _nccl_choice(value: str, found: Iterable[str]) -> list[str] | None:
    """Return what NCCL takes, None where that is nothing: prefixes; what must not be after `^`, names after `=`."""
    is_not, is_exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = tuple(word for word in value.lstrip("^=").split(",") if word)
    chosen = [name for name in found if (name in words if is_exact else name.startswith(words)) is not is_not]
    return chosen or None


def _gloo_choice(value: str, found: Iterable[str]) -> list[str] | None:
    """Return what gloo takes, full names; None where one of them is not there."""
    names = {word.strip() for word in value.split(",") if word.strip()}
    return [name for name in found if name in names] if names.issubset(found) else None


REACH_TRIES = 3
REACH_TIMEOUT_S = 1.0
DEFAULT_PORT = 29500


def names(context: Context) -> Iterator[Finding]:
    """Yield whether names resolve and the rendezvous can be reached. The resolver may hang."""
    elsewhere, env = context.has_nodes_elsewhere, context.environment
    found: list[str] = []
    if context.rendezvous:
        host, port = split_endpoint(context.rendezvous)
        finding, found = name_finding("resolves", host, elsewhere=elsewhere)
        yield finding
    else:
        evidence = "no rendezvous is named (MASTER_ADDR and MASTER_PORT, or --rendezvous): one node needs none"
        yield RENDEZVOUS.found("resolves", Status.UNAVAILABLE, evidence)
    # Gloo offers its peers the address of this machine's name, unless a variable names its interface. It stops a job
    # only where that surely cannot do without: its nodes are not all on this machine, and NCCL's way is not named.
    if not env.get(GLOO_INTERFACE):
        is_far = bool(found) and not any(map(is_loopback, found)) and not is_here(found)
        must = elsewhere and is_far and not env.get(NCCL_INTERFACE)
        yield name_finding("own_name", host_name(), elsewhere=elsewhere, must=must)[0]
    if found:
        yield reach(host, port, found, before_start="RANK" not in env)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of `host:port`, `host`, `[::1]:29500`. Port 0 or none stands for torch's default.

    Raises:
        ValueError: The port is no number from 0 to 65535.
    """
    host, port = endpoint.strip(), ""
    if host.startswith("["):
        host, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    if not host or not (port or "0").isdecimal() or int(port or 0) >= 1 << 16:
        raise ValueError(f"expected host:port, not {endpoint!r}")
    return host, int(port or 0) or DEFAULT_PORT


def addresses(name: str) -> list[str]:
    """Return the addresses of a name, each once. Blocks as long as the resolver likes.

    Raises:
        OSError: It has none.
    """
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def name_finding(check: str, name: str, *, elsewhere: bool, must: bool = True) -> tuple[Finding, list[str]]:
    """Return whether a name resolves, how long that took, and to what.

    `elsewhere`: ranks on other nodes use the answer, for whom a loopback address is their own machine.
    """
    began = time.monotonic()
    found: list[str] = []
    error = "no address"
    try:
        found = addresses(name)
    except (OSError, UnicodeError) as problem:
        error = str(getattr(problem, "strerror", None) or problem)
    took_s = time.monotonic() - began
    status, cure = high(took_s, degraded=RENDEZVOUS.limit(check)), "see which server is slow: `resolvectl query`"
    evidence = f"{', '.join(found[:4])} after {1000 * took_s:.0f} ms"
    is_loop = bool(found) and all(map(is_loopback, found))
    if not found or is_loop:
        cure = RENDEZVOUS.checks[check].cure
    if not found:
        status, evidence = Status.FAILED if must else Status.DEGRADED, f"does not resolve: {error}"
    elif is_loop and elsewhere:
        may_be_here = check == "resolves" and is_of_this_machine(name)
        status = Status.FAILED if must and not may_be_here else Status.DEGRADED
        why = "by which the other nodes reach themselves"
        if may_be_here:
            why = "right where all launchers are here, or the other nodes resolve it otherwise"
        evidence = f"{', '.join(found)}: a loopback address, {why}"
    more: Mapping[str, Any] = {"cure": cure, "must": must, "data": {"addresses": found}}
    return RENDEZVOUS.found(check, status, evidence, round(took_s, 4), subject=name, **more), found


def reach(host: str, port: int, found: Sequence[str], *, before_start: bool) -> Finding:
    """Return whether the rendezvous can be reached, and how far away it is; connects and hangs up at once.

    `before_start`: no rank of this job runs yet, so nobody should answer on this machine's own port.
    """
    took: list[float] = []
    error: OSError | None = None
    is_open = False
    for _ in range(REACH_TRIES):
        began = time.monotonic()
        try:
            with socket.create_connection((found[0], port), timeout=REACH_TIMEOUT_S):
                is_open = True
        except ConnectionRefusedError:
            pass  # the machine answered, and nobody listens yet: as it should be before a job
        except OSError as problem:
            error = problem
            break
        took.append(time.monotonic() - began)
    return reach_finding(host, port, took, error, is_open=is_open, is_taken=is_open and before_start and is_here(found))


def reach_finding(
    host: str, port: int, took_s: Sequence[float], error: OSError | None, *, is_open: bool, is_taken: bool
) -> Finding:
    """Return what is said of connections that took so long, or failed so. Pure."""
    median = statistics.median(took_s) if took_s else None
    value = None if median is None else round(median, 6)
    if error is not None:
        is_late = isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT
        why = f"no answer within {REACH_TIMEOUT_S:g} s" if is_late else error.strerror or error
        status, evidence = Status.FAILED, f"cannot be reached: {why}"
        cure = f"open port {port} between the nodes (firewall, security group), check the route (`ip route get`)"
    elif is_taken:
        status = Status.DEGRADED
        evidence = f"something listens on port {port} of this machine already, before the job has begun"
        cure = f"see who (`ss -ltnp 'sport = :{port}'`) and end it, or choose another port"
    else:
        status, cure = high(median or 0.0, degraded=RENDEZVOUS.limit("reach")), RENDEZVOUS.checks["reach"].cure
        heard = "somebody listens" if is_open else "nobody listens yet"
        evidence = f"answers within {1000 * (median or 0.0):.2g} ms, {heard}"
    return RENDEZVOUS.found("reach", status, evidence, value, subject=f"{host}:{port}", cure=cure)


def is_loopback(address: str) -> bool:
    """Tell whether an address is only of the machine that uses it."""
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_of_this_machine(name: str) -> bool:
    """Tell whether a name is one of this machine's own: only here may it have a loopback address.

    Debian gives one to the machine's name; and launchers may be several on one machine. Asks the resolver.
    """
    plain = name.lower().rstrip(".")
    if is_loopback(name) or plain == "localhost" or plain.endswith(".localhost"):
        return True
    own = (socket.gethostname(), socket.getfqdn())
    return plain.partition(".")[0] in {each.lower().partition(".")[0] for each in own}


def is_here(found: Sequence[str]) -> bool:
    """Tell whether one of the addresses is this machine's: only those can be bound."""
    for address in found:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.bind((address, 0))
                return True
        except OSError:
            continue
    return False
