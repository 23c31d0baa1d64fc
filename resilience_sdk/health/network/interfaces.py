"""Network interfaces, from /sys/class/net: whether they are up, flap, or lose packets, and whether the job's exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from resilience_sdk import kernel_files
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import judged

PROBE = "network"
MOST_FLAPS = 5  # how often the link may have gone down since the machine started; boots and switch upgrades count
# A cable within the Ethernet standards loses less than one packet in ten million; this is ten times that.
MOST_ERROR_SHARE = 1e-6
_ERRORS = ("rx_crc_errors", "rx_errors", "tx_errors", "tx_carrier_errors")
_NCCL, _GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


@attrs.frozen
class Interface:
    """One network interface. `is_real`: it has a device behind it, so it is neither a bridge nor a tunnel."""

    name: str
    state: str  # up, down, unknown, ...
    is_real: bool
    has_carrier: bool
    flaps: int | None
    speed_mbps: int | None
    packets: int
    errors: dict[str, int]


def interfaces(root: str) -> list[Interface]:
    """Return every interface."""
    found = []
    for entry in kernel_files.entries(kernel_files.below(root, "/sys/class/net")):
        if not entry.is_dir():
            continue  # /sys/class/net also holds the switch of the bonding driver, a file
        counts = entry / "statistics"
        speed = kernel_files.number(entry / "speed")
        found.append(
            Interface(
                name=entry.name,
                state=kernel_files.text(entry / "operstate") or "unknown",
                is_real=(entry / "device").exists(),
                has_carrier=kernel_files.number(entry / "carrier") == 1,
                flaps=kernel_files.number(entry / "carrier_down_count"),
                speed_mbps=speed if speed is not None and speed > 0 else None,
                packets=sum(kernel_files.number(counts / f"{way}_packets") or 0 for way in ("rx", "tx")),
                errors={name: count for name in _ERRORS if (count := kernel_files.number(counts / name)) is not None},
            )
        )
    return found


def interface_findings(found: Sequence[Interface]) -> Iterator[Finding]:
    """Yield what is said of each interface that has a device behind it. Pure.

    Without a link nothing is wrong with it: nobody means to use it, unless it `works` at another look.
    """
    for interface in found:
        if interface.is_real:
            yield _interface(interface) if interface.has_carrier else _free(interface)


def _free(interface: Interface) -> Finding:
    evidence = f"no link: {interface.state}, no cable, or nothing at its other end"
    return Finding(
        probe=PROBE,
        check="interface",
        subject=interface.name,
        status=Status.OK,
        evidence=evidence,
        data={"works": False, "lost": f"see the cable, the switch and `dmesg | grep {interface.name}`"},
    )


def _interface(interface: Interface) -> Finding:
    errors = sum(interface.errors.values())
    share = errors / max(1, interface.packets)
    flaps = interface.flaps or 0
    problems = []
    if flaps > MOST_FLAPS:
        problems.append(f"its link went down {flaps} times since the machine started")
    if share > MOST_ERROR_SHARE:
        told = ", ".join(f"{name} {count}" for name, count in interface.errors.items() if count)
        problems.append(f"{share:.2g} of its packets were bad ({told})")
    cure = (
        f"see whether it goes on (`ip -s link show {interface.name}`, `dmesg | grep {interface.name}`): reseat or "
        "replace cable and transceiver, or leave this node out"
    )
    speed = f"{interface.speed_mbps} Mb/s" if interface.speed_mbps else "speed not told"
    return judged(
        probe=PROBE,
        check="interface",
        subject=interface.name,
        status=Status.DEGRADED if problems else Status.OK,
        value=flaps,
        unit="times down",
        threshold=MOST_FLAPS,
        evidence="; ".join(problems) or f"{interface.state}, {speed}",
        cure=cure,
        data={
            "works": True,
            "errors": interface.errors,
            "speed_mbps": interface.speed_mbps,
            "growth": {"per_minute": 0, "cure": cure},
        },
    )


def chosen_interfaces(found: Sequence[Interface], env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether the interfaces that the job's variables choose are there and up. Pure."""
    for variable, choose in ((_NCCL, _nccl_choice), (_GLOO, _gloo_choice)):
        value = env.get(variable, "").strip()
        if not value:
            continue
        chosen, missing = choose(value, found)
        down = [interface.name for interface in chosen if interface.state == "down"]
        names = ", ".join(interface.name for interface in found)
        if missing:
            evidence = f"{variable}={value}, and there is no such interface; there are: {names}"
        elif chosen and len(down) == len(chosen):
            evidence = f"{variable}={value}, which is down"
        else:
            evidence = f"{variable}={value} takes {', '.join(interface.name for interface in chosen)}"
        is_bad = missing or (bool(chosen) and len(down) == len(chosen))
        yield judged(
            probe=PROBE,
            check="chosen_interface",
            subject=variable,
            status=Status.FAILED if is_bad else Status.OK,
            value=value,
            evidence=evidence,
            cure=f"name one that every node has and that is up (`ip -br addr`), or unset {variable}",
            must=True,
        )


def _nccl_choice(value: str, found: Sequence[Interface]) -> tuple[list[Interface], bool]:
    """Return what NCCL takes: prefixes, after `^` those it must not take, after `=` full names."""
    is_not, is_exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^=").split(",") if word]

    def fits(interface: Interface) -> bool:
        named = [interface.name == word if is_exact else interface.name.startswith(word) for word in words]
        return any(named) is not is_not

    chosen = [interface for interface in found if fits(interface)]
    return chosen, not chosen


def _gloo_choice(value: str, found: Sequence[Interface]) -> tuple[list[Interface], bool]:
    """Return what gloo takes: full names, all of which must be there."""
    names = [word.strip() for word in value.split(",") if word.strip()]
    chosen = [interface for interface in found if interface.name in names]
    return chosen, len(chosen) < len(set(names))
