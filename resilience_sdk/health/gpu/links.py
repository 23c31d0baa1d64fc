"""Is the GPU connected as it should be: PCIe, NVLink, and the NVSwitch fabric."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import attrs

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.gpu import nvml as codes
from resilience_sdk.health.gpu.check import Check, Device
from resilience_sdk.health.gpu.load import IDLE
from resilience_sdk.health.gpu.rules import found
from resilience_sdk.health.probes import Context

_PCIE_REPLAYS = 94  # NVML_FI_DEV_PCIE_REPLAY_COUNTER
_LINK_COUNT = 91  # NVML_FI_DEV_NVLINK_LINK_COUNT
# Counters over all links, of GPUs before Hopper: CRC of flits and of data, replays, recoveries
_ALL_LINKS = (38, 45, 52, 59)
# Counters of one link, of later GPUs: CRC, replays, recoveries; link recovery events since Blackwell
_ONE_LINK = (163, 161, 162, 215)


@attrs.frozen(kw_only=True)
class Pcie:
    """A PCIe link; `idle` tells that nothing ran on the GPU, when the link may rest at a lower generation."""

    width: int
    widest: int
    generation: int
    highest: int
    idle: bool
    replays: int | None = None


def _read_pcie(nvml: Any, device: Device, _context: Context) -> Pcie:
    handle = device.handle
    # The idle bit is read first: what comes after it can only be more awake.
    idle = bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & IDLE)
    return Pcie(
        width=nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        widest=nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        generation=nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        highest=nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        idle=idle,
        replays=codes.field_values(nvml, handle, [_PCIE_REPLAYS])[0],
    )


def judge_pcie(subject: str, link: Pcie) -> Iterator[Finding]:
    """Judge a PCIe link against what GPU and slot can; its generation only while the GPU works."""
    narrow = link.width < link.widest
    yield found(
        "pcie_width",
        subject,
        Status.DEGRADED if narrow else Status.OK,
        value=link.width,
        threshold=link.widest,
        evidence=f"x{link.width} of x{link.widest}" if narrow else "",
    )
    low = link.generation < link.highest
    evidence = f"generation {link.generation} of {link.highest}"
    yield found(
        "pcie_generation",
        subject,
        Status.DEGRADED if low and not link.idle else Status.OK,
        value=link.generation,
        threshold=link.highest,
        evidence=f"{evidence}{' while idle' if link.idle else ''}" if low else "",
    )
    if link.replays is not None:
        yield found("pcie_replays", subject, Status.OK, value=link.replays)


@attrs.frozen(kw_only=True)
class NvLinks:
    """The NVLinks of a GPU; a counter is the sum over links, None where this GPU does not have it."""

    up: tuple[int, ...]
    down: tuple[int, ...]
    crc: int | None = None
    replays: int | None = None
    recoveries: int | None = None


def _read_nvlinks(nvml: Any, device: Device, _context: Context) -> NvLinks | None:
    handle = device.handle
    count = codes.field_values(nvml, handle, [_LINK_COUNT])[0]
    if not count:
        return None
    states = {link: codes.answer(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(count)}
    # A link that this board does not have is neither up nor down.
    active = {link: bool(state) for link, state in states.items() if state is not None}
    flits, data, replays, recoveries = codes.field_values(nvml, handle, list(_ALL_LINKS))
    crc = _sum([flits, data])
    each: list[int | tuple[int, int]] = [(field, link) for link in active for field in _ONE_LINK]
    if each:
        values = codes.field_values(nvml, handle, each)
        width = len(_ONE_LINK)
        crc = _sum([crc, *values[0::width]])
        replays = _sum([replays, *values[1::width]])
        recoveries = _sum([recoveries, *values[2::width], *values[3::width]])
    return NvLinks(
        up=tuple(link for link, on in active.items() if on),
        down=tuple(link for link, on in active.items() if not on),
        crc=crc,
        replays=replays,
        recoveries=recoveries,
    )


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def judge_nvlinks(subject: str, links: NvLinks | None) -> Iterator[Finding]:
    """Judge the NVLinks of one GPU.

    Where none is up there may be no bridge at all, so that is told and not held against the GPU, unless it `works` at
    another look.
    """
    if links is None:
        return
    if not links.up:
        evidence = "no NVLink is up: there is no bridge or switch, or the fabric manager does not run"
        yield found("nvlink_down", subject, Status.UNAVAILABLE, evidence=evidence, data={"works": False})
        return
    down = ", ".join(map(str, links.down))
    yield found(
        "nvlink_down",
        subject,
        Status.FAILED if links.down else Status.OK,
        value=len(links.down),
        evidence=f"of {len(links.up) + len(links.down)} links these are down: {down}" if links.down else "",
        data={"works": True, "up": len(links.up), **({"cause": "gpu_nvlink_error"} if links.down else {})},
    )
    if links.recoveries is not None:
        yield found(
            "nvlink_recoveries",
            subject,
            Status.DEGRADED if links.recoveries else Status.OK,
            value=links.recoveries,
            evidence=f"{links.recoveries} since the driver was loaded" if links.recoveries else "",
            data={"cause": "gpu_nvlink_error"} if links.recoveries else {},
        )
    if links.crc is not None:
        yield found("nvlink_crc", subject, Status.OK, value=links.crc)
    if links.replays is not None:
        yield found("nvlink_replays", subject, Status.OK, value=links.replays)


# nvmlGpuFabricState_t
_NOT_STARTED, _IN_PROGRESS, _COMPLETED = 1, 2, 3


def _read_fabric(nvml: Any, device: Device, _context: Context) -> tuple[int, int]:
    # Not in bindings of 2023, whose older question has a structure that is not the driver's.
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(device.handle, ctypes.byref(info))
    return info.state, info.status


def judge_fabric(subject: str, fabric: tuple[int, int]) -> Iterator[Finding]:
    """Judge (state of the GPU's registration with the fabric manager, its NVML return code)."""
    state, code = fabric
    if state == _COMPLETED and code == 0:
        yield found("fabric", subject, Status.OK, value="completed")
    elif state in (_NOT_STARTED, _IN_PROGRESS, _COMPLETED):
        value = {_NOT_STARTED: "not started", _IN_PROGRESS: "in progress", _COMPLETED: f"failed with {code}"}[state]
        evidence = f"registration with the fabric manager: {value}; CUDA will say that the system is not initialized"
        yield found("fabric", subject, Status.FAILED, value=value, evidence=evidence)


CHECKS = (
    Check("pcie", _read_pcie, judge_pcie),
    Check("nvlink", _read_nvlinks, judge_nvlinks),
    Check("fabric", _read_fabric, judge_fabric),
)
