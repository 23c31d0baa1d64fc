"""Does the GPU run as fast as it can: clocks, heat, power, and memory that others hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.gpu import nvml as codes
from resilience_sdk.health.gpu.check import Check, Device
from resilience_sdk.health.gpu.choosing import mig_handle
from resilience_sdk.health.gpu.rules import RULES, found
from resilience_sdk.health.probes import Context

IDLE = 0x1
# nvmlClocksEventReasons that make the GPU slower than it is told to be -> (what is said, what to do)
_BRAKES: Mapping[int, tuple[str, str]] = {
    0x8: ("hardware slowdown", RULES["throttle"].cure),
    0x20: ("software thermal slowdown", "check the node's cooling, fans and inlet temperature"),
    0x40: ("hardware thermal slowdown", "check the node's cooling and fans at once; leave the node out if it stays"),
    0x80: ("hardware power brake", "check the node's power supply and its cables; leave the node out if it stays"),
    0x200: ("board limit", RULES["throttle"].cure),
    0x400: ("reliability voltage limit", RULES["throttle"].cure),
}
_HARDWARE_SLOWDOWN = 0x8  # also shown for a moment while an idle GPU changes its clocks
_HARDWARE_REASONS = 0x40 | 0x80  # why there is a hardware slowdown
_POWER_CAP = 0x4

_MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
_SHUTDOWN, _SLOWDOWN, _MEMORY_MAX = 0, 1, 2  # nvmlTemperatureThresholds_t
_MIB = 1 << 20
_MOST_OF_IT = 0.5  # held by others: no job of ours will fit


def _read_throttle(nvml: Any, device: Device, _context: Context) -> int:
    # The name since driver 535; bindings and drivers before it have the other.
    older = nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", older)
    reasons: int | None = codes.answer(newer, device.handle)
    return int(older(device.handle)) if reasons is None else reasons


def judge_throttle(subject: str, reasons: int) -> Iterator[Finding]:
    """Judge NVML's bits of reasons for lower clocks; the power cap under load is how a GPU is meant to run."""
    if reasons & (IDLE | _HARDWARE_REASONS):
        reasons &= ~_HARDWARE_SLOWDOWN
    brakes = [told for bit, told in _BRAKES.items() if reasons & bit]
    said = ", ".join(name for name, _ in brakes)
    if brakes:
        cure = "; ".join(dict.fromkeys(cure for _, cure in brakes))
        yield found("throttle", subject, Status.DEGRADED, value=said, evidence=f"slowed by {said}", cure=cure)
    else:
        value = "idle" if reasons & IDLE else "power cap" if reasons & _POWER_CAP else "none"
        yield found("throttle", subject, Status.OK, value=value)


@attrs.frozen(kw_only=True)
class Heat:
    """Temperatures in degrees Celsius; None where this GPU does not tell."""

    gpu: int
    slowdown: int | None = None
    shutdown: int | None = None
    memory: int | None = None
    memory_max: int | None = None


def _read_heat(nvml: Any, device: Device, _context: Context) -> Heat:
    gpu = nvml.nvmlDeviceGetTemperature(device.handle, 0)

    def threshold(kind: int) -> int | None:
        return codes.answer(nvml.nvmlDeviceGetTemperatureThreshold, device.handle, kind) or None

    memory = codes.answer(codes.field_values, nvml, device.handle, [_MEMORY_TEMPERATURE])
    return Heat(
        gpu=gpu,
        slowdown=threshold(_SLOWDOWN),
        shutdown=threshold(_SHUTDOWN),
        memory=(memory[0] or None) if memory else None,
        memory_max=threshold(_MEMORY_MAX),
    )


def judge_heat(subject: str, heat: Heat) -> Iterator[Finding]:
    """Judge the temperatures against the driver's own thresholds."""
    limit = heat.slowdown or heat.shutdown
    hot = limit is not None and heat.gpu >= limit
    evidence = f"{heat.gpu} C, slows down at {heat.slowdown} C and shuts down at {heat.shutdown} C" if hot else ""
    status = Status.DEGRADED if hot else Status.OK
    yield found("temperature", subject, status, value=heat.gpu, threshold=limit, evidence=evidence)
    if heat.memory is not None:
        hot = heat.memory_max is not None and heat.memory >= heat.memory_max
        status = Status.DEGRADED if hot else Status.OK
        evidence = f"{heat.memory} C, its limit is {heat.memory_max} C" if hot else ""
        yield found(
            "memory_temperature", subject, status, value=heat.memory, threshold=heat.memory_max, evidence=evidence
        )


def _read_power(nvml: Any, device: Device, _context: Context) -> tuple[float, float, float]:
    milliwatts = (
        nvml.nvmlDeviceGetPowerUsage(device.handle),
        nvml.nvmlDeviceGetEnforcedPowerLimit(device.handle),
        nvml.nvmlDeviceGetPowerManagementDefaultLimit(device.handle),
    )
    used, enforced, default = (value / 1000 for value in milliwatts)
    return used, enforced, default


def judge_power(subject: str, power: tuple[float, float, float]) -> Iterator[Finding]:
    """Judge (used, limit in force, default limit) in watts."""
    used, enforced, default = power
    capped = enforced < default
    evidence = f"limited to {enforced:g} W of {default:g} W" if capped else f"uses {used:.0f} W of {enforced:g} W"
    yield found(
        "power_limit",
        subject,
        Status.DEGRADED if capped else Status.OK,
        value=enforced,
        threshold=default,
        evidence=evidence,
        data={"used_w": used},
    )


@attrs.frozen(kw_only=True)
class Held:
    """The memory of a GPU in bytes, and who holds it: (process id, its memory where NVML tells, its name)."""

    total: int
    used: int  # by all, without what the driver reserves for itself where it tells that
    processes: tuple[tuple[int, int | None, str], ...] = ()
    own_pids: frozenset[int] = frozenset()


def _read_memory(nvml: Any, device: Device, context: Context) -> Held | None:
    """Return who holds memory; None of a GPU that is divided, where it is not known which part is the job's."""
    is_divided, instance = mig_handle(nvml, device.handle, device.mig)
    if is_divided and instance is None:
        return None
    handle = instance if is_divided else device.handle
    # Only the second version tells what the driver reserves for itself apart.
    newer = codes.answer(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle) if newer is None else newer
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return Held(
        total=memory.total,
        used=memory.used,
        processes=tuple((process.pid, process.usedGpuMemory, _name(context, process.pid)) for process in processes),
        own_pids=frozenset(context.own_pids),
    )


def _name(context: Context, pid: int) -> str:
    try:
        with open(f"{context.root.rstrip('/')}/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""  # of another pid namespace, or gone


def judge_memory(subject: str, held: Held | None) -> Iterator[Finding]:
    """Judge how much memory others hold: what is used less what the job's own processes use.

    Processes of other containers cannot be named, but their memory counts, unless it may be the job's own.
    """
    if held is None:
        evidence = "this GPU is divided (MIG), and which part is the job's is not told"
        yield found("memory_held", subject, Status.UNAVAILABLE, evidence=evidence)
        return
    own = sum(size or 0 for pid, size, _ in held.processes if pid in held.own_pids)
    unknown_own = any(size is None for pid, size, _ in held.processes if pid in held.own_pids)
    others = [process for process in held.processes if process[0] not in held.own_pids]
    by_name = sum(size or 0 for _, size, _ in others)
    held_bytes = by_name if unknown_own else max(held.used - own, by_name)
    mib = held_bytes // _MIB
    limit = RULES["memory_held"].limit or 0
    status, must = Status.OK, ""
    nobody_is_known = not any(pid in held.own_pids or name for pid, _, name in held.processes)
    if mib >= limit and held.own_pids and nobody_is_known:
        # A job that is asked from inside, in a container: the driver has other process ids for the same processes.
        evidence = f"{mib} MiB are held, and whether by this job or others cannot be told from here"
        yield found("memory_held", subject, Status.UNAVAILABLE, value=mib, evidence=evidence)
        return
    if mib >= limit:
        status = Status.FAILED if held_bytes > _MOST_OF_IT * held.total else Status.DEGRADED
        must = f"{mib} MiB of {held.total // _MIB} MiB are held"
    names = ", ".join(f"process {pid}{f' ({name})' if name else ''}" for pid, _, name in others[:5])
    evidence = f"{must} by {names or 'processes that cannot be seen from here'}" if must else ""
    data = {"pids": [pid for pid, _, _ in others]}
    yield found("memory_held", subject, status, value=mib, evidence=evidence, data=data)


CHECKS = (
    Check("throttle", _read_throttle, judge_throttle),
    Check("temperature", _read_heat, judge_heat),
    Check("power_limit", _read_power, judge_power),
    Check("memory_held", _read_memory, judge_memory),
)
