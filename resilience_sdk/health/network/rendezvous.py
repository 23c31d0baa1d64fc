"""Names and the way to the rendezvous: whether they resolve, to what, and how far away it is."""

from __future__ import annotations

import errno
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address

from resilience_sdk.health import grading
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import judged

PROBE = "rendezvous"
OWN_NAME = "own_name"
SLOW_NAME_S = 1.0
SLOW_REACH_S = 0.010  # nodes of one job are well below a millisecond from each other
REACH_TRIES = 3
REACH_TIMEOUT_S = 1.0
DEFAULT_PORT = 29500
_NAME_CURE = (
    "correct the name (MASTER_ADDR, --rdzv-endpoint), or add it to DNS or /etc/hosts; under Slurm: "
    '`scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1`'
)


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


def name_finding(
    check: str,
    name: str,
    resolve: Callable[[str], list[str]],
    *,
    elsewhere: bool,
    must: bool,
    cure: str = _NAME_CURE,
    may_be_here: Callable[[str], bool] = lambda _: False,
) -> tuple[Finding, list[str]]:
    """Return whether a name resolves, how long that took, and to what.

    `elsewhere`: ranks on other nodes use the answer, for whom a loopback address is their own machine. `may_be_here`:
    whether a name may well have one, so that it stops nothing.
    """
    began = time.monotonic()
    try:
        found, error = resolve(name), ""
    except (OSError, UnicodeError) as problem:
        found, error = [], str(getattr(problem, "strerror", None) or problem)
    took_s = time.monotonic() - began
    is_own = bool(found) and all(is_loopback(address) for address in found)
    status = grading.high(took_s, degraded=SLOW_NAME_S)
    evidence = f"{', '.join(found[:4])} after {1000 * took_s:.0f} ms"
    if error or not found:
        status, evidence = Status.FAILED if must else Status.DEGRADED, f"does not resolve: {error or 'no address'}"
    elif is_own and elsewhere:
        is_wrong = must and not may_be_here(name)
        status = Status.FAILED if is_wrong else Status.DEGRADED
        meaning = "a loopback address, by which the other nodes reach themselves"
        if must and not is_wrong:
            meaning = "a loopback address: right where all launchers are here, or the other nodes resolve it otherwise"
        evidence = f"{', '.join(found)}: {meaning}"
    finding = judged(
        probe=PROBE,
        check=check,
        subject=name,
        status=status,
        value=round(took_s, 4),
        unit="s",
        threshold=SLOW_NAME_S,
        evidence=evidence,
        cure=cure if status is Status.FAILED or not found or is_own else "see which server is slow: `resolvectl query`",
        must=must,
        data={"addresses": found},
    )
    return finding, found


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
    status = Status.OK if median is None else grading.high(median, degraded=SLOW_REACH_S)
    heard = "somebody listens" if is_open else "nobody listens yet"
    evidence = "" if median is None else f"answers within {1000 * median:.2g} ms, {heard}"
    cure = "start the job on nodes nearer to each other, or see what fills the network (`mtr`)"
    if error is not None:
        status = Status.FAILED
        evidence = f"cannot be reached: {reason(error)}"
        cure = f"open port {port} between the nodes (firewall, security group), check the route (`ip route get`)"
    elif is_taken:
        status = Status.DEGRADED
        evidence = f"something listens on port {port} of this machine already, before the job has begun"
        cure = f"see who (`ss -ltnp 'sport = :{port}'`) and end it, or choose another port"
    return judged(
        probe=PROBE,
        check="reach",
        subject=f"{host}:{port}",
        status=status,
        value=None if median is None else round(median, 6),
        unit="" if median is None else "s",
        threshold=SLOW_REACH_S,
        evidence=evidence,
        cure=cure,
        must=True,
    )


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


def is_elsewhere(found: Sequence[str]) -> bool:
    """Tell whether addresses are another machine's, for sure."""
    return bool(found) and not any(map(is_loopback, found)) and not is_here(found)


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


def reason(error: OSError) -> str:
    """Return why a connection failed."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return f"no answer within {REACH_TIMEOUT_S:g} s"
    return error.strerror or str(error)


def own_name(
    name: str, resolve: Callable[[str], list[str]], *, elsewhere: bool, must: bool, chosen: bool
) -> Iterator[Finding]:
    """Yield whether this machine's own name resolves: gloo offers that address to its peers.

    `chosen`: a variable names gloo's interface, so the name does not matter. `must`: nothing else can be used.
    """
    if chosen:
        return
    cure = (
        "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the nodes (`ip -br addr`), or correct "
    )
    cure += "/etc/hosts (Debian puts the machine's name on 127.0.1.1)"
    finding, _ = name_finding(OWN_NAME, name, resolve, elsewhere=elsewhere, must=must, cure=cure)
    yield finding
