"""Is the GPU's memory sound: ECC errors, rows and pages taken out of use, and what the driver wants done about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.gpu import nvml as codes
from resilience_sdk.health.gpu.check import Check, Device
from resilience_sdk.health.gpu.rules import RULES, found
from resilience_sdk.health.probes import Context

_CORRECTED, _UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
_VOLATILE, _AGGREGATE = 0, 1  # nvmlEccCounterType_t
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, driver 570
_PAGES_TO_REPLACE = 60  # NVIDIA replaces a GPU with that many; DCGM fails there

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


@attrs.frozen(kw_only=True)
class Ecc:
    """ECC as NVML tells it; a counter is None where this GPU does not have it."""

    on: bool
    on_after_reset: bool
    on_by_default: bool = True
    corrected: int | None = None
    uncorrected: int | None = None
    uncorrected_ever: int | None = None
    recovery_action: int | None = None


def _read_ecc(nvml: Any, device: Device, _context: Context) -> Ecc:
    current, pending = nvml.nvmlDeviceGetEccMode(device.handle)
    default = codes.answer(nvml.nvmlDeviceGetDefaultEccMode, device.handle)

    def total(kind: int, since: int) -> int | None:
        count: int | None = codes.answer(nvml.nvmlDeviceGetTotalEccErrors, device.handle, kind, since)
        return count

    return Ecc(
        on=bool(current),
        on_after_reset=bool(pending),
        on_by_default=bool(current if default is None else default),
        corrected=total(_CORRECTED, _VOLATILE) if current else None,
        uncorrected=total(_UNCORRECTED, _VOLATILE) if current else None,
        uncorrected_ever=total(_UNCORRECTED, _AGGREGATE) if current else None,
        recovery_action=_read_recovery_action(nvml, device, _context),
    )


def judge_ecc(subject: str, ecc: Ecc) -> Iterator[Finding]:
    """Judge the ECC mode and counters.

    Uncorrectable errors fail a GPU unless its driver knows what they ask for and says: nothing.
    """
    if ecc.on != ecc.on_by_default or ecc.on != ecc.on_after_reset:
        mode = {True: "on", False: "off"}
        evidence = (
            f"ECC is {mode[ecc.on]}, {mode[ecc.on_by_default]} by default, {mode[ecc.on_after_reset]} after a reset"
        )
        yield found("ecc_mode", subject, Status.DEGRADED, value=mode[ecc.on], evidence=evidence)
    if ecc.uncorrected is not None:
        status, evidence = Status.OK, ""
        if ecc.uncorrected:
            contained = ecc.recovery_action == 0
            status = Status.DEGRADED if contained else Status.FAILED
            evidence = f"{ecc.uncorrected} uncorrectable errors since the driver was loaded" + (
                "; the driver asks for no recovery" if contained else ""
            )
        yield found(
            "ecc_uncorrected_volatile",
            subject,
            status,
            value=ecc.uncorrected,
            evidence=evidence,
            data={"cause": "gpu_ecc_uncorrectable"} if ecc.uncorrected else {},
        )
    if ecc.uncorrected_ever is not None:
        yield found("ecc_uncorrected_aggregate", subject, Status.OK, value=ecc.uncorrected_ever)
    if ecc.corrected is not None:
        yield found("ecc_corrected_volatile", subject, Status.OK, value=ecc.corrected)


def _read_recovery_action(nvml: Any, device: Device, _context: Context) -> int | None:
    values = codes.answer(codes.field_values, nvml, device.handle, [_RECOVERY_ACTION])
    return values[0] if values else None


def judge_recovery_action(subject: str, action: int | None) -> Iterator[Finding]:
    """Judge what the driver says that the GPU needs; nothing where it does not say."""
    if action is None:
        return
    if action == 0:
        yield found("recovery_action", subject, Status.OK, value="none")
        return
    name, cure = _ACTIONS.get(action, (f"action {action}", RULES["recovery_action"].cure))
    evidence = f"the driver asks for: {name}"
    data = {"cause": "gpu_hang"}
    yield found("recovery_action", subject, Status.FAILED, value=name, evidence=evidence, cure=cure, data=data)


def _read_remapped_rows(nvml: Any, device: Device, _context: Context) -> tuple[int, int, int, int]:
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(device.handle)
    return corrected, uncorrected, pending, failed


def judge_remapped_rows(subject: str, rows: tuple[int, int, int, int]) -> Iterator[Finding]:
    """Judge (rows remapped for correctable errors, for uncorrectable ones, is one pending, did one ever fail)."""
    corrected, uncorrected, pending, failed = rows
    evidence = f"{uncorrected} rows remapped after uncorrectable errors, {corrected} after correctable ones"
    for check, flag in (("row_remap_failure", failed), ("row_remap_pending", pending)):
        bad = Status.FAILED if check == "row_remap_failure" else Status.DEGRADED
        data = {"cause": f"gpu_{check}"} if flag else {}
        yield found(check, subject, bad if flag else Status.OK, value=int(bool(flag)), evidence=evidence, data=data)


def _read_retired_pages(nvml: Any, device: Device, _context: Context) -> tuple[int, int, int]:
    by_cause = [len(nvml.nvmlDeviceGetRetiredPages(device.handle, cause)) for cause in (0, 1)]
    return by_cause[0], by_cause[1], nvml.nvmlDeviceGetRetiredPagesPendingStatus(device.handle)


def judge_retired_pages(subject: str, pages: tuple[int, int, int]) -> Iterator[Finding]:
    """Judge (pages retired for single bit errors, for double bit errors, whether one is pending)."""
    single, double, pending = pages
    count = single + double
    status = Status.OK
    if count >= _PAGES_TO_REPLACE:
        status = Status.FAILED
    elif count >= (RULES["retired_pages"].limit or 0):
        status = Status.DEGRADED
    yield found(
        "retired_pages",
        subject,
        status,
        value=count,
        evidence=f"{single} for single bit errors, {double} for double bit errors",
    )
    status = Status.DEGRADED if pending else Status.OK
    evidence = "a page is retired at the next reset" if pending else ""
    yield found("retired_pages_pending", subject, status, value=int(bool(pending)), evidence=evidence)


def _read_inforom(nvml: Any, device: Device, _context: Context) -> bool:
    try:
        nvml.nvmlDeviceValidateInforom(device.handle)
    except Exception as error:
        if codes.code_of(error) == codes.CORRUPTED_INFOROM:
            return False
        raise
    return True


def judge_inforom(subject: str, sound: bool) -> Iterator[Finding]:
    """Judge whether the InfoROM's checksum is right."""
    evidence = "" if sound else "its checksum is wrong"
    yield found("inforom", subject, Status.OK if sound else Status.DEGRADED, evidence=evidence)


CHECKS = (
    Check("recovery_action", _read_recovery_action, judge_recovery_action),
    Check("row_remap", _read_remapped_rows, judge_remapped_rows),
    Check("ecc", _read_ecc, judge_ecc),
    Check("retired_pages", _read_retired_pages, judge_retired_pages),
    Check("inforom", _read_inforom, judge_inforom),
)
