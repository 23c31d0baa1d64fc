"""The GPU probe: every GPU in a thread of its own, so that one that hangs the driver hides no other.

The threads end with the process; a call that never returns is named in a finding and left to the kernel.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.gpu import driver, events, links, load, memory
from resilience_sdk.health.gpu import nvml as codes
from resilience_sdk.health.gpu.check import Device
from resilience_sdk.health.gpu.choosing import choice
from resilience_sdk.health.gpu.rules import found
from resilience_sdk.health.gpu.visible import VISIBLE, Choice, entries
from resilience_sdk.health.probes import Context

# What tells most, and hangs least, comes first.
CHECKS = (*memory.CHECKS, *load.CHECKS, *links.CHECKS)
_TELL_PART = 0.2  # of the deadline, for each GPU to tell who it is
_PATIENCE = 0.7  # of the deadline: what hangs is told while there is still time to tell it


def probe(context: Context) -> Iterator[Finding]:
    """Yield what NVML tells of this node's GPUs that the job may see. Its process must end after it."""
    if entries(context.environment) == []:
        yield found("driver", "", Status.UNAVAILABLE, evidence=f"the job sees no GPU ({VISIBLE} names none)")
        return
    ends = time.monotonic() + _PATIENCE * context.deadline_s
    nvml, missing = driver.connect(context.root)
    if missing is not None:
        yield missing
        return
    try:
        gpus, described = driver.describe(nvml, context.root)
    except nvml.NVMLError as error:
        yield found("driver", "", Status.FAILED, evidence=codes.meaning(error)[0])
        return
    mine = choice(nvml, gpus, context.environment, _TELL_PART * context.deadline_s)
    yield driver.judge_choice(described, gpus, mine, context.environment)
    asks: dict[str, Callable[[], Iterator[Finding]]] = {
        f"GPU {index}": partial(ask, nvml, index, context, mine.migs.get(index, "")) for index in mine.indices
    }
    if mine.indices:
        listen_s = min(context.listen_s, 0.5 * context.deadline_s)
        asks["Xid events"] = partial(_listen, nvml, mine.indices, listen_s)
    yield from _of_the_job(mine, beside_each_other(asks, ends))


def _of_the_job(mine: Choice, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield what is said of GPUs, that they hang, too; of those that may be another job's nothing stops this one."""
    for finding in findings:
        yield finding if mine.sure else attrs.evolve(finding, must=False)


def listen(context: Context) -> Iterator[Finding]:
    """Yield the Xid events of the job's GPUs in the next `context.listen_s` seconds; nothing where it has none."""
    nvml, missing = driver.connect(context.root)
    if missing is not None or not (gpus := nvml.nvmlDeviceGetCount()):
        return
    left_s = max(0.0, context.deadline_s - context.listen_s)
    if mine := choice(nvml, gpus, context.environment, _TELL_PART * left_s).indices:
        yield from _listen(nvml, mine, context.listen_s)


def ask(nvml: Any, index: int, context: Context, mig: str = "") -> Iterator[Finding]:
    """Yield what one GPU answers; stops at the first answer that tells that it is broken.

    `mig` names the instance of it that is the job's, where it is divided.
    """
    started = time.monotonic()
    subject = f"GPU {index}"
    identity: dict[str, Any] = {}
    silent: list[str] = []
    try:
        device = Device(subject, nvml.nvmlDeviceGetHandleByIndex(index), mig)
        identity = _identity(nvml, device)
        for check in CHECKS:
            try:
                answer = check.read(nvml, device, context)
            except (nvml.NVMLError, AttributeError) as error:
                if codes.not_offered(error):
                    silent.append(check.name)
                elif codes.code_of(error) == codes.NO_PERMISSION:
                    silent.append(f"{check.name} (not allowed)")
                else:
                    raise
            else:
                yield from check.judge(subject, answer)
    except nvml.NVMLError as error:
        evidence, cause = codes.meaning(error)
        if codes.code_of(error) == codes.NO_PERMISSION:  # where the scheduler gives each job GPUs of its own
            yield found("answers", subject, Status.UNAVAILABLE, evidence=f"not for this job: {evidence}")
            return
        data = {**identity, "cause": cause}
        yield found("answers", subject, Status.FAILED, evidence=f"{evidence}{_where(identity)}", data=data)
        return
    evidence = f"{identity['name']}{_where(identity)}"
    if silent:
        evidence += f"; does not tell: {', '.join(silent)}"
    took = round(time.monotonic() - started, 3)
    yield found("answers", subject, Status.OK, value=took, evidence=evidence, data=identity)


def _identity(nvml: Any, device: Device) -> dict[str, Any]:
    def text(value: str | bytes) -> str:
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    return {
        "name": text(nvml.nvmlDeviceGetName(device.handle)),
        "uuid": text(nvml.nvmlDeviceGetUUID(device.handle)),
        "pci": text(nvml.nvmlDeviceGetPciInfo(device.handle).busId).lower()[-12:],  # as the kernel log has it
    }


def _where(identity: dict[str, Any]) -> str:
    return f" at {identity['pci']}" if identity else ""


def _listen(nvml: Any, gpus: Sequence[int], seconds: float) -> Iterator[Finding]:
    try:
        yield from events.listen(nvml, gpus, seconds)
    except nvml.NVMLError as error:
        yield found("xid", "", Status.UNAVAILABLE, evidence=codes.meaning(error)[0])


def beside_each_other(asks: dict[str, Callable[[], Iterator[Finding]]], ends: float) -> Iterator[Finding]:
    """Yield the findings of all `asks` as they come; of those that have not ended at `ends`, where they hang.

    `ends` is a time of the monotonic clock. The threads of those that hang go on for ever.
    """
    told: queue.Queue[tuple[str, Finding | None]] = queue.Queue()
    threads = {
        name: threading.Thread(target=_tell, args=(name, source, told), name=name, daemon=True)
        for name, source in asks.items()
    }
    started = time.monotonic()
    for thread in threads.values():
        thread.start()
    open_ = set(threads)
    while open_:
        try:
            name, finding = told.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            break
        if finding is None:
            open_.discard(name)
        else:
            yield finding
    for name in threads:
        if name in open_:
            yield _hung(name, threads[name], time.monotonic() - started)


def _tell(name: str, source: Callable[[], Iterator[Finding]], told: queue.Queue[tuple[str, Finding | None]]) -> None:
    try:
        for finding in source():
            told.put((name, finding))
    except Exception as error:  # noqa: BLE001 - one GPU's mistake must not hide the others
        evidence = f"the probe itself failed: {type(error).__name__}: {error}"
        told.put((name, found("answers", name, Status.UNAVAILABLE, evidence=evidence)))
    told.put((name, None))


def _hung(name: str, thread: threading.Thread, seconds: float) -> Finding:
    frame = sys._current_frames().get(thread.ident or 0)
    call = frame.f_code.co_name if frame is not None else "the driver"
    evidence = f"{call} has not returned within {seconds:.1f} s"
    data = {"cause": "gpu_gsp_timeout", "call": call}
    return found("answers", name, Status.FAILED, value=round(seconds, 1), evidence=evidence, data=data)
