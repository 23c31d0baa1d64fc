"""The checks of one GPU: memory and its errors, links, clocks, heat, power, and memory that others hold.

Each is one function of a `Device`, which asks the driver through NVIDIA's management library (NVML) and may hang there.
What a GPU or an older driver does not have is no fault; limits that the driver knows are asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from resilience_sdk.core.words import MIB
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import GPU, Context
from resilience_sdk.system import procfs

# Return codes of nvml.h. Numbers, because older bindings do not have all the names.
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
CORRUPTED_INFOROM = 14
# This GPU, this driver or this machine does not have what was asked for: INVALID_ARGUMENT (a link or a sensor that this
# GPU does not have), NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND (the driver is older than the question), NO_DATA,
# VGPU_ECC_NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH, DEPRECATED, NOT_READY.
_NOT_OFFERED = frozenset({2, 3, 6, 13, 21, 22, 25, 26, 27})
# return code -> (what it means, cause in the taxonomy)
_BROKEN = {
    9: ("the kernel driver is not loaded", "environment_error"),
    10: ("the GPU's firmware (GSP) did not answer the driver in time", "gpu_gsp_timeout"),
    11: ("the GPU's interrupts do not arrive", "gpu_hardware_faulty"),
    15: ("the GPU has fallen off the bus", "gpu_fell_off_bus"),
    16: ("the GPU needs a reset", "gpu_hang"),
    17: ("the operating system refuses access to the GPU", "gpu_cuda_unknown_error"),
    18: ("the driver's library and its kernel module are of different versions", "environment_error"),
    29: ("the GPU is in an invalid state", "gpu_hang"),
    999: ("the driver cannot talk to the GPU, often because its firmware (GSP) is dead", "gpu_gsp_timeout"),
}
# nvmlValueType_t, in its order
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def code_of(error: BaseException) -> int | None:
    """Return the NVML return code of an exception; None when it is none of NVML's."""
    value = getattr(error, "value", None)
    return value if type(error).__module__ == "pynvml" and isinstance(value, int) else None


def not_offered(error: BaseException) -> bool:
    """Tell whether there is nothing to ask: an AttributeError is a binding that is older than the question."""
    return isinstance(error, AttributeError) or code_of(error) in _NOT_OFFERED


def answer(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer to a question to NVML, None where it is not offered; raises NVMLError for all else."""
    try:
        return question(*arguments)
    except Exception as error:
        if not_offered(error):
            return None
        raise


def meaning(error: BaseException) -> tuple[str, str]:
    """Return what an NVML error says about the GPU, and its cause in the taxonomy."""
    code = code_of(error)
    text, cause = _BROKEN.get(-1 if code is None else code, ("", "gpu_cuda_unknown_error"))
    said = f"{error} (NVML error {code})"
    return (f"{text}: {said}" if text else said), cause


def plain(value: str | bytes) -> str:
    """Return a text of NVML, which older bindings give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@attrs.frozen
class Device:
    """One GPU, or an instance of it; questions raise NVMLError, or AttributeError where the binding has none such."""

    nvml: Any
    index: int
    handle: Any
    mig: str = ""  # the instance that is the job's, where the GPU is divided

    @property
    def subject(self) -> str:
        """Name it."""
        return f"GPU {self.index}"

    def ask(self, question: str, *arguments: Any) -> Any:
        """Return what `nvmlDevice<question>` answers."""
        return getattr(self.nvml, f"nvmlDevice{question}")(self.handle, *arguments)

    def ask_if(self, question: str, *arguments: Any) -> Any:
        """Return what it answers, None where it is not offered."""
        return answer(self.ask, question, *arguments)

    def fields(self, *fields: int | tuple[int, int]) -> list[int | None]:
        """Return the integers of NVML fields, None for each that this GPU does not have.

        A field is its number, or its number and its scope (a link).
        """
        return [
            int(getattr(field.value, _MEMBERS[field.valueType]))
            if field.nvmlReturn == 0 and field.valueType < len(_MEMBERS)
            else None
            for field in self.ask("GetFieldValues", list(fields))
        ]

    def fields_if(self, *fields: int) -> list[int | None]:
        """Return the same, None for each where the driver has no fields at all."""
        return answer(self.fields, *fields) or [None] * len(fields)

    def found(self, check: str, status: Status, *what: Any, **more: Any) -> Finding:
        """Return the finding of a check of this GPU (see `Probe.found`)."""
        return GPU.found(check, status, *what, subject=self.subject, **more)


def _grade(is_bad: object, bad: Status = Status.DEGRADED) -> Status:
    return bad if is_bad else Status.OK


_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, driver 570
# nvmlDeviceGpuRecoveryAction_t: what to do, from no recovery to the heaviest
_ACTIONS = {
    1: ("GPU reset", "end all its processes, then `nvidia-smi --gpu-reset -i N`"),
    2: ("node reboot", "reboot the node before the GPU is used again"),
    3: ("drain P2P", "end the processes that use this GPU from its peers, then reset it; until then no NVLink job"),
    4: ("drain and reset", "let its jobs end, start none, then `nvidia-smi --gpu-reset -i N`"),
    5: ("recover the IMEX domain", "restart the IMEX domain that this node belongs to (`nvidia-imex-ctl`)"),
    6: ("bus reset", "reset the GPU's PCIe bus, or reboot the node"),
    7: ("system reboot", "power-cycle the node"),
}


def recovery_action(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield what the driver says that the GPU needs; nothing where it does not say."""
    (action,) = device.fields_if(_RECOVERY_ACTION)
    if action == 0:
        yield device.found("recovery_action", Status.OK, "", "none")
    elif action is not None:
        name, cure = _ACTIONS.get(action, (f"action {action}", GPU.checks["recovery_action"].cure))
        evidence, data = f"the driver asks for: {name}", {"cause": "gpu_hang"}
        yield device.found("recovery_action", Status.FAILED, evidence, name, cure=cure, data=data)


def row_remap(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield whether remapping a faulty row has failed, or waits for a reset."""
    corrected, uncorrected, pending, failed = device.ask("GetRemappedRows")
    evidence = f"{uncorrected} rows remapped after uncorrectable errors, {corrected} after correctable ones"
    for check, flag, bad in (
        ("row_remap_failure", failed, Status.FAILED),
        ("row_remap_pending", pending, Status.DEGRADED),
    ):
        data = {"cause": f"gpu_{check}"} if flag else {}
        yield device.found(check, _grade(flag, bad), evidence, int(bool(flag)), data=data)


_CORRECTED, _UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
_VOLATILE, _AGGREGATE = 0, 1  # nvmlEccCounterType_t


def ecc(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield the ECC mode and counters.

    Uncorrectable errors fail a GPU unless its driver knows what they ask for and says: nothing.
    """
    current, after_reset = device.ask("GetEccMode")
    default = device.ask_if("GetDefaultEccMode")
    modes = [bool(mode) for mode in (current, current if default is None else default, after_reset)]
    if len(set(modes)) > 1:
        on, by_default, then = ("on" if mode else "off" for mode in modes)
        evidence = f"ECC is {on}, {by_default} by default, {then} after a reset"
        yield device.found("ecc_mode", Status.DEGRADED, evidence, on)
    if not current:
        return
    uncorrected = device.ask_if("GetTotalEccErrors", _UNCORRECTED, _VOLATILE)
    if uncorrected:
        is_contained = device.fields_if(_RECOVERY_ACTION) == [0]
        evidence = f"{uncorrected} uncorrectable errors since the driver was loaded"
        evidence += "; the driver asks for no recovery" if is_contained else ""
        status = Status.DEGRADED if is_contained else Status.FAILED
        data = {"cause": "gpu_ecc_uncorrectable"}
        yield device.found("ecc_uncorrected_volatile", status, evidence, uncorrected, data=data)
    elif uncorrected == 0:
        yield device.found("ecc_uncorrected_volatile", Status.OK, "", 0)
    for check, kind, since in (
        ("ecc_uncorrected_aggregate", _UNCORRECTED, _AGGREGATE),
        ("ecc_corrected_volatile", _CORRECTED, _VOLATILE),
    ):
        if (count := device.ask_if("GetTotalEccErrors", kind, since)) is not None:
            yield device.found(check, Status.OK, "", count)


_PAGES_TO_REPLACE = 60  # NVIDIA replaces a GPU with that many; DCGM fails there


def retired_pages(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield how many pages were retired, and whether one waits for a reset."""
    single, double = (len(device.ask("GetRetiredPages", cause)) for cause in (0, 1))
    pending = device.ask("GetRetiredPagesPendingStatus")
    count = single + double
    status = Status.FAILED if count >= _PAGES_TO_REPLACE else _grade(count >= GPU.limit("retired_pages"))
    evidence = f"{single} for single bit errors, {double} for double bit errors"
    yield device.found("retired_pages", status, evidence, count)
    evidence = "a page is retired at the next reset" if pending else ""
    yield device.found("retired_pages_pending", _grade(pending), evidence, int(bool(pending)))


def inforom(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield whether the InfoROM's checksum is right."""
    try:
        device.ask("ValidateInforom")
    except Exception as error:
        if code_of(error) != CORRUPTED_INFOROM:
            raise
        yield device.found("inforom", Status.DEGRADED, "its checksum is wrong")
    else:
        yield device.found("inforom", Status.OK)


_IDLE, _POWER_CAP = 0x1, 0x4
_HARDWARE_SLOWDOWN = 0x8  # also shown for a moment while an idle GPU changes its clocks
_HARDWARE_REASONS = 0x40 | 0x80  # why there is a hardware slowdown
_SLOW_CURE = GPU.checks["throttle"].cure
# nvmlClocksEventReasons that make the GPU slower than it is told to be -> (what is said, what to do)
_BRAKES: Mapping[int, tuple[str, str]] = {
    0x8: ("hardware slowdown", _SLOW_CURE),
    0x20: ("software thermal slowdown", "check the node's cooling, fans and inlet temperature"),
    0x40: ("hardware thermal slowdown", "check the node's cooling and fans at once; leave the node out if it stays"),
    0x80: ("hardware power brake", "check the node's power supply and its cables; leave the node out if it stays"),
    0x200: ("board limit", _SLOW_CURE),
    0x400: ("reliability voltage limit", _SLOW_CURE),
}


def throttle(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield what slows the clocks down; the power cap under load is how a GPU is meant to run."""
    # The name since driver 535; bindings and drivers before it have the other.
    reasons = device.ask_if("GetCurrentClocksEventReasons")
    if reasons is None:
        reasons = device.ask("GetCurrentClocksThrottleReasons")
    if reasons & (_IDLE | _HARDWARE_REASONS):
        reasons &= ~_HARDWARE_SLOWDOWN
    brakes = [told for bit, told in _BRAKES.items() if reasons & bit]
    if brakes:
        said = ", ".join(name for name, _ in brakes)
        cure = "; ".join(dict.fromkeys(cure for _, cure in brakes))
        yield device.found("throttle", Status.DEGRADED, f"slowed by {said}", said, cure=cure)
    else:
        value = "idle" if reasons & _IDLE else "power cap" if reasons & _POWER_CAP else "none"
        yield device.found("throttle", Status.OK, "", value)


_MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
_SHUTDOWN, _SLOWDOWN, _MEMORY_MAX = 0, 1, 2  # nvmlTemperatureThresholds_t


def temperature(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield the temperatures against the driver's own thresholds."""
    now = device.ask("GetTemperature", 0)
    shutdown, slowdown, memory_max = (
        device.ask_if("GetTemperatureThreshold", kind) or None for kind in (_SHUTDOWN, _SLOWDOWN, _MEMORY_MAX)
    )
    limit = slowdown or shutdown
    is_hot = limit is not None and now >= limit
    evidence = f"{now} C, slows down at {slowdown} C and shuts down at {shutdown} C" if is_hot else ""
    yield device.found("temperature", _grade(is_hot), evidence, now, limit=limit)
    (memory,) = device.fields_if(_MEMORY_TEMPERATURE)
    if memory:
        is_hot = memory_max is not None and memory >= memory_max
        evidence = f"{memory} C, its limit is {memory_max} C" if is_hot else ""
        yield device.found("memory_temperature", _grade(is_hot), evidence, memory, limit=memory_max)


def power_limit(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield the power limit in force against the default one, in watts."""
    questions = ("GetPowerUsage", "GetEnforcedPowerLimit", "GetPowerManagementDefaultLimit")
    used, enforced, default = (device.ask(question) / 1000 for question in questions)
    is_capped = enforced < default
    evidence = f"limited to {enforced:g} W of {default:g} W" if is_capped else f"uses {used:.0f} W of {enforced:g} W"
    yield device.found("power_limit", _grade(is_capped), evidence, enforced, limit=default, data={"used_w": used})


_MOST_OF_IT = 0.5  # held by others: no job of ours will fit


def memory_held(device: Device, context: Context) -> Iterator[Finding]:
    """Yield how much memory others hold: what is used less what the job's own processes use.

    Processes of other containers cannot be named, but their memory counts, unless it may be the job's own.
    """
    part = instance(device)
    if part is None:
        evidence = "this GPU is divided (MIG), and which part is the job's is not told"
        yield device.found("memory_held", Status.UNAVAILABLE, evidence)
        return
    # Only the second version tells what the driver reserves for itself apart.
    memory = part.ask_if("GetMemoryInfo", device.nvml.nvmlMemory_v2) or part.ask("GetMemoryInfo")
    processes = part.ask("GetComputeRunningProcesses")
    own = [process.usedGpuMemory for process in processes if process.pid in context.own_pids]
    others = [process.pid for process in processes if process.pid not in context.own_pids]
    held = sum(process.usedGpuMemory or 0 for process in processes if process.pid in others)
    if None not in own:
        held = max(held, memory.used - sum(own))
    mib, data = held // MIB, {"pids": others}
    if mib < GPU.limit("memory_held"):
        yield device.found("memory_held", Status.OK, "", mib, data=data)
        return
    names = {pid: procfs.text(procfs.below(context.root, f"/proc/{pid}/comm")) for pid in others}
    if context.own_pids and not own and not any(names.values()):
        # A job that is asked from inside, in a container: the driver has other process ids for the same processes.
        evidence = f"{mib} MiB are held, and whether by this job or others cannot be told from here"
        yield device.found("memory_held", Status.UNAVAILABLE, evidence, mib)
        return
    holders = ", ".join(f"process {pid}" + (f" ({names[pid]})" if names[pid] else "") for pid in others[:5])
    evidence = f"{mib} MiB of {memory.total // MIB} MiB are held by "
    evidence += holders or "processes that cannot be seen from here"
    status = Status.FAILED if held > _MOST_OF_IT * memory.total else Status.DEGRADED
    yield device.found("memory_held", status, evidence, mib, data=data)


def instance(device: Device) -> Device | None:
    """Return the part of a GPU that is the job's: itself unless it is divided, None where nobody tells which part."""
    mode = device.ask_if("GetMigMode")
    if not mode or not mode[0]:
        return device
    handle = answer(device.nvml.nvmlDeviceGetHandleByUUID, device.mig.encode()) if device.mig else None
    return None if handle is None else attrs.evolve(device, handle=handle)


_PCIE_REPLAYS = 94  # NVML_FI_DEV_PCIE_REPLAY_COUNTER


def pcie(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield a PCIe link against what GPU and slot can; its generation counts only while the GPU works."""
    # The idle bit is read first: what comes after it can only be more awake.
    is_idle = bool(device.ask("GetCurrentClocksThrottleReasons") & _IDLE)
    width, widest = device.ask("GetCurrPcieLinkWidth"), device.ask("GetMaxPcieLinkWidth")
    generation, highest = device.ask("GetCurrPcieLinkGeneration"), device.ask("GetMaxPcieLinkGeneration")
    (replays,) = device.fields(_PCIE_REPLAYS)
    is_narrow, is_low = width < widest, generation < highest
    evidence = f"x{width} of x{widest}" if is_narrow else ""
    yield device.found("pcie_width", _grade(is_narrow), evidence, width, limit=widest)
    evidence = f"generation {generation} of {highest}{' while idle' if is_idle else ''}" if is_low else ""
    yield device.found("pcie_generation", _grade(is_low and not is_idle), evidence, generation, limit=highest)
    if replays is not None:
        yield device.found("pcie_replays", Status.OK, "", replays)


_LINK_COUNT = 91  # NVML_FI_DEV_NVLINK_LINK_COUNT
# Counters over all links, of GPUs before Hopper: CRC of flits and of data, replays, recoveries
_ALL_LINKS = (38, 45, 52, 59)
# Counters of one link, of later GPUs: CRC, replays, recoveries; link recovery events since Blackwell
_ONE_LINK = (163, 161, 162, 215)


def nvlink(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield the NVLinks of one GPU.

    Where none is up there may be no bridge at all, so that is told and not held against the GPU, unless it `works` at
    another look.
    """
    (count,) = device.fields(_LINK_COUNT)
    states = {link: device.ask_if("GetNvLinkState", link) for link in range(count or 0)}
    links = [link for link, state in states.items() if state is not None]  # others this board does not have
    if not count:
        return
    down = [link for link in links if not states[link]]
    if len(down) == len(links):
        evidence = "no NVLink is up: there is no bridge or switch, or the fabric manager does not run"
        yield device.found("nvlink_down", Status.UNAVAILABLE, evidence, data={"works": False})
        return
    flits, payload, replays, recoveries = device.fields(*_ALL_LINKS)
    each = device.fields(*((field, link) for link in links for field in _ONE_LINK))
    by_field = [each[number :: len(_ONE_LINK)] for number in range(len(_ONE_LINK))]
    fault = {"cause": "gpu_nvlink_error"}
    evidence = f"of {len(links)} links these are down: {', '.join(map(str, down))}" if down else ""
    data = {"works": True, "up": len(links) - len(down), **(fault if down else {})}
    yield device.found("nvlink_down", _grade(down, Status.FAILED), evidence, len(down), data=data)
    if (total := _sum(recoveries, *by_field[2], *by_field[3])) is not None:
        evidence = f"{total} since the driver was loaded" if total else ""
        yield device.found("nvlink_recoveries", _grade(total), evidence, total, data=fault if total else {})
    for check, counts in (("nvlink_crc", [flits, payload, *by_field[0]]), ("nvlink_replays", [replays, *by_field[1]])):
        if (total := _sum(*counts)) is not None:
            yield device.found(check, Status.OK, "", total)


def _sum(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


# nvmlGpuFabricState_t
_FABRIC_STATES = {1: "not started", 2: "in progress", 3: "completed"}


def fabric(device: Device, _context: Context) -> Iterator[Finding]:
    """Yield whether the GPU has joined the NVSwitch fabric; nothing where there is none."""
    # Not in bindings of 2023, whose older question has a structure that is not the driver's.
    info = device.nvml.c_nvmlGpuFabricInfoV_t()
    device.ask("GetGpuFabricInfoV", ctypes.byref(info))
    value = _FABRIC_STATES.get(info.state)
    if value == "completed":
        value = f"failed with {info.status}" if info.status else value
    if value == "completed":
        yield device.found("fabric", Status.OK, "", value)
    elif value is not None:
        evidence = f"registration with the fabric manager: {value}; CUDA will say that the system is not initialized"
        yield device.found("fabric", Status.FAILED, evidence, value)


# What tells most, and hangs least, comes first.
CHECKS = (
    *(recovery_action, row_remap, ecc, retired_pages, inforom),
    *(throttle, temperature, power_limit, memory_held),
    *(pcie, nvlink, fabric),
)


def ask_all(device: Device, context: Context, silent: list[str]) -> Iterator[Finding]:
    """Yield what a GPU answers to all checks; `silent` takes the names of those that it does not offer or allow.

    Raises NVMLError where it answers that it is broken.
    """
    for check in CHECKS:
        try:
            yield from list(check(device, context))
        except Exception as error:
            if not_offered(error):
                silent.append(check.__name__)
            elif code_of(error) == NO_PERMISSION:
                silent.append(f"{check.__name__} (not allowed)")
            else:
                raise
