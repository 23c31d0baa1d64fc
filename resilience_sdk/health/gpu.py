"""The GPU probe: the driver, which GPUs are the job's, their checks, and Xid events.

Every GPU is asked in a thread of its own, through NVIDIA's management library, so that one that hangs hides no other.
The threads end with the process; a call that never returns is named in a finding and left to the kernel.

`CUDA_VISIBLE_DEVICES` is read as CUDA reads it. CUDA numbers the GPUs that this process may open: by their place on the
bus, as NVML does, or the fastest first, which is the same where all are of one model. It reads entries until the first
that names nothing, and takes none at all where one is named twice. An entry may be the beginning of a UUID, or name an
instance of a GPU that is divided (MIG).
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from resilience_sdk.health import gpu_checks as nvml_codes
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.gpu_checks import Device, ask_all, code_of, meaning, plain
from resilience_sdk.health.probes import GPU, Context
from resilience_sdk.system import procfs

_TELL_PART = 0.2  # of the deadline, for each GPU to tell who it is
_PATIENCE = 0.7  # of the deadline: what hangs is told while there is still time to tell it


def probe(context: Context) -> Iterator[Finding]:
    """Yield what NVML tells of this node's GPUs that the job may see. Its process must end after it."""
    if entries(context.environment) == []:
        yield GPU.found("driver", Status.UNAVAILABLE, f"the job sees no GPU ({VISIBLE} names none)")
        return
    ends = time.monotonic() + _PATIENCE * context.deadline_s
    nvml, missing = connect(context.root)
    if missing is not None:
        yield missing
        return
    try:
        gpus, described = describe(nvml, context.root)
    except nvml.NVMLError as error:
        yield GPU.found("driver", Status.FAILED, meaning(error)[0])
        return
    mine = choice(nvml, gpus, context.environment, _TELL_PART * context.deadline_s)
    yield judge_choice(described, gpus, mine, context.environment)
    asks: dict[str, Callable[[], Iterator[Finding]]] = {
        f"GPU {index}": partial(ask, nvml, index, context, mine.migs.get(index, "")) for index in mine.indices
    }
    if mine.indices:
        asks["Xid events"] = partial(hear_events, nvml, mine.indices, min(context.listen_s, 0.5 * context.deadline_s))
    for finding in beside_each_other(asks, ends):
        yield finding if mine.sure else attrs.evolve(finding, must=False)  # that it hangs, too: it may be another job's


def listen(context: Context) -> Iterator[Finding]:
    """Yield the Xid events of the job's GPUs in the next `context.listen_s` seconds; nothing where it has none."""
    nvml, missing = connect(context.root)
    if missing is not None or not (gpus := nvml.nvmlDeviceGetCount()):
        return
    left_s = max(0.0, context.deadline_s - context.listen_s)
    if mine := choice(nvml, gpus, context.environment, _TELL_PART * left_s).indices:
        yield from hear_events(nvml, mine, context.listen_s)


def connect(root: str) -> tuple[Any, Finding | None]:
    """Return (the binding with NVML initialised, None), or (None, why there is nothing to ask).

    May hang in the driver. `root` stands before /sys. A node without GPUs is well without a driver; a container that
    was given none sees the host's on the bus.
    """
    try:
        import pynvml
    except ImportError as error:
        return None, GPU.found("driver", Status.UNAVAILABLE, f"{error}; pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pci = pci_gpus(root)
        seen = f"the PCI bus shows {len(pci)} NVIDIA GPU{'s'[: len(pci) != 1]} ({', '.join(pci[:8])})"
        if code_of(error) == nvml_codes.LIBRARY_NOT_FOUND:
            evidence = "no NVIDIA driver (libnvidia-ml.so.1 is not there)"
            if pci:
                evidence += f", though {seen}: install the driver, or give this container the GPUs (`--gpus all`)"
            return None, GPU.found("driver", Status.UNAVAILABLE, evidence)
        if code_of(error) == nvml_codes.DRIVER_NOT_LOADED and not pci:
            return None, GPU.found("driver", Status.UNAVAILABLE, "no NVIDIA GPU on this node")
        said, cause = meaning(error)
        evidence = f"NVML cannot start: {said}" + (f"; {seen}" if pci else "")
        return None, GPU.found("driver", Status.FAILED, evidence, data={"cause": cause})
    return pynvml, None


def pci_gpus(root: str) -> list[str]:
    """Return the addresses of the NVIDIA GPUs on the PCI bus: VGA and 3D controllers."""
    return [
        device.name
        for device in procfs.entries(procfs.below(root, "/sys/bus/pci/devices"))
        if procfs.text(device / "vendor") == "0x10de"
        and (procfs.text(device / "class") or "").startswith(("0x0300", "0x0302"))
    ]


def describe(nvml: Any, root: str) -> tuple[int, Finding]:
    """Return how many GPUs NVML has, and the finding with all versions. Raises NVMLError."""
    gpus: int = nvml.nvmlDeviceGetCount()
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    data: dict[str, Any] = {
        "driver": plain(nvml.nvmlSystemGetDriverVersion()),
        "nvml": plain(nvml.nvmlSystemGetNVMLVersion()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": gpus,
    }
    evidence = f"driver {data['driver']}, CUDA {data['cuda']}, {gpus} GPU{'s'[: gpus != 1]}"
    # Those that the kernel driver took over; a container sees only its own.
    known = len(procfs.entries(procfs.below(root, "/proc/driver/nvidia/gpus")))
    if gpus >= known:
        status = Status.OK if gpus else Status.UNAVAILABLE
        return gpus, GPU.found("driver", status, evidence, data["driver"], data=data)
    evidence += f", though the kernel driver has {known}: {known - gpus} did not start"
    cure = "reboot the node; leave it out, and hand the GPU in for replacement, if it stays away"
    data["cause"] = "gpu_fell_off_bus"
    return gpus, GPU.found("driver", Status.FAILED, evidence, data["driver"], cure=cure, data=data)


def ask(nvml: Any, index: int, context: Context, mig: str = "") -> Iterator[Finding]:
    """Yield what one GPU answers; stops at the first answer that tells that it is broken.

    `mig` names the instance of it that is the job's, where it is divided.
    """
    started = time.monotonic()
    subject, where = f"GPU {index}", ""
    identity: dict[str, str] = {}
    silent: list[str] = []
    try:
        device = Device(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index), mig)
        identity = {"name": plain(device.ask("GetName")), "uuid": plain(device.ask("GetUUID"))}
        identity["pci"] = plain(device.ask("GetPciInfo").busId).lower()[-12:]  # as the kernel log has it
        where = f" at {identity['pci']}"
        yield from ask_all(device, context, silent)
    except nvml.NVMLError as error:
        evidence, cause = meaning(error)
        if code_of(error) == nvml_codes.NO_PERMISSION:  # where the scheduler gives each job GPUs of its own
            yield GPU.found("answers", Status.UNAVAILABLE, f"not for this job: {evidence}", subject=subject)
            return
        data = {**identity, "cause": cause}
        yield GPU.found("answers", Status.FAILED, f"{evidence}{where}", subject=subject, data=data)
        return
    evidence = f"{identity['name']}{where}"
    if silent:
        evidence += f"; does not tell: {', '.join(silent)}"
    took = round(time.monotonic() - started, 3)
    yield GPU.found("answers", Status.OK, evidence, took, subject=subject, data=identity)


def beside_each_other(asks: Mapping[str, Callable[[], Iterator[Finding]]], ends: float) -> Iterator[Finding]:
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
    while threads:
        try:
            name, finding = told.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            break
        if finding is None:
            del threads[name]
        else:
            yield finding
    for name, thread in threads.items():
        frame = sys._current_frames().get(thread.ident or 0)
        call = frame.f_code.co_name if frame is not None else "the driver"
        took = time.monotonic() - started
        evidence, data = f"{call} has not returned within {took:.1f} s", {"cause": "gpu_gsp_timeout", "call": call}
        yield GPU.found("answers", Status.FAILED, evidence, round(took, 1), subject=name, data=data)


def _tell(name: str, source: Callable[[], Iterator[Finding]], told: queue.Queue[tuple[str, Finding | None]]) -> None:
    try:
        for finding in source():
            told.put((name, finding))
    except Exception as error:  # noqa: BLE001 - one GPU's mistake must not hide the others
        evidence = f"the probe itself failed: {type(error).__name__}: {error}"
        told.put((name, GPU.found("answers", Status.UNAVAILABLE, evidence, subject=name)))
    told.put((name, None))


_XID = 0x8  # nvmlEventTypeXidCriticalError
_TOGETHER_S = 0.5  # a GPU that fails reports several Xids
_STORM = 64  # events after which the end of the time ends it; fewer are all taken
_WAITS = frozenset({"gpu_row_remap_pending"})  # the GPU can be used until its next reset
_LOOK_S = 5.0  # one wait in the driver; short enough that a lost timeout costs little


def hear_events(nvml: Any, gpus: Sequence[int], seconds: float) -> Iterator[Finding]:
    """Yield one finding for each Xid event of these GPUs until `seconds` have passed, or one that there was none.

    The first event leaves time for those that come with it and no more, so that it is told soon. Blocks in the driver,
    which costs no processor time.
    """
    seen, ends = 0, time.monotonic() + seconds
    try:
        events = nvml.nvmlEventSetCreate()
        if not any([_registered(nvml, index, events) for index in gpus]):
            yield GPU.found("xid", Status.UNAVAILABLE, "no GPU of this node reports events")
            return
        while (left := ends - time.monotonic()) > 0 or seen < _STORM:
            try:
                event = nvml.nvmlEventSetWait(events, int(1000 * max(0.0, min(left, _LOOK_S))))
            except nvml.NVMLError as error:
                if code_of(error) != nvml_codes.TIMEOUT:
                    raise
                if left <= _LOOK_S:
                    break
                continue
            if event.eventType == _XID:
                seen += 1
                ends = min(ends, time.monotonic() + _TOGETHER_S)
                yield judge_xid(f"GPU {nvml.nvmlDeviceGetIndex(event.device)}", event.eventData)
    except nvml.NVMLError as error:
        yield GPU.found("xid", Status.UNAVAILABLE, meaning(error)[0])
        return
    if not seen:
        yield GPU.found("xid", Status.OK, f"none within {seconds:g} s", 0)


def _registered(nvml: Any, index: int, events: Any) -> bool:
    """Ask for the events of a GPU; what ails one that refuses its own checks tell."""
    try:
        nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(index), _XID, events)
    except nvml.NVMLError:
        return False
    return True


def judge_xid(subject: str, number: int) -> Finding:
    """Judge one Xid by the SDK's table of causes: the hardware's own fail the GPU, those of programs do not."""
    # Late: it reads the whole table of causes, and an Xid is rare.
    from resilience_sdk.attribution.log_signs import xid_causes
    from resilience_sdk.attribution.taxonomy import lookup

    cause = xid_causes().get(number)
    if cause is None:
        return GPU.found("xid", Status.DEGRADED, f"Xid {number}", number, subject=subject)
    entry = lookup(cause)
    is_hardware = entry.action == "exclude_node" and cause not in _WAITS
    status = Status.FAILED if is_hardware else Status.DEGRADED
    return GPU.found("xid", status, f"Xid {number}: {entry.meaning}", number, subject=subject, data={"cause": cause})


VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_BY_PLACE = "PCI_BUS_ID"
_MIG, _OLD_MIG = "MIG-", "MIG-GPU-"


@attrs.frozen
class Listed:
    """One GPU of NVML that this process may open. `uuid` and `name` are empty where it does not tell."""

    index: int
    uuid: str = ""
    name: str = ""


@attrs.frozen
class Choice:
    """The GPUs of a job, by NVML's numbers.

    `migs`: by GPU, the name of the instance that is the job's. `missing`: the first entry that names nothing.
    `sure`: these are the job's; False where only CUDA could tell, so that all that may be are among them.
    """

    indices: tuple[int, ...]
    migs: Mapping[int, str] = attrs.field(factory=dict)
    missing: str = ""
    sure: bool = True


def entries(env: Mapping[str, str]) -> list[str] | None:
    """Return what is named in `CUDA_VISIBLE_DEVICES` as far as CUDA reads it; None where it is not set."""
    value = env.get(VISIBLE)
    if value is None:
        return None
    named: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not (entry.isdecimal() or entry.startswith(("GPU-", _MIG))):
            break
        named.append(entry)
    return named if len(set(named)) == len(named) else []


def cuda_devices(env: Mapping[str, str], present: int) -> int:
    """Return how many devices a process of the job has, where `present` GPUs are there."""
    named = entries(env)
    if named is None:
        return present
    if any(entry.startswith(_MIG) for entry in named):
        return min(1, present)  # CUDA gives a process one instance
    past = next((place for place, entry in enumerate(named) if entry.isdecimal() and int(entry) >= present), len(named))
    return min(past, present)


def choose(env: Mapping[str, str], gpus: Sequence[Listed], parents: Mapping[str, str]) -> Choice:
    """Return which of a node's GPUs are the job's; `parents` has the GPU's UUID for each instance that is named."""
    named, everything = entries(env), tuple(gpu.index for gpu in gpus)
    if named is None:
        return Choice(everything)
    chosen: set[int] = set()
    migs: dict[int, str] = {}
    missing = ""
    for entry in named:
        uuid = parents.get(entry, "") if entry.startswith(_MIG) else entry
        found = [gpu for gpu in gpus if uuid and gpu.uuid.startswith(uuid)]
        if entry.isdecimal():
            found = list(gpus[int(entry) :][:1])
        if len(found) != 1:
            missing = entry
            break
        chosen.add(found[0].index)
        if entry.startswith(_MIG):
            migs.setdefault(found[0].index, entry)
    if missing:  # it may be one that does not even tell its name
        chosen |= {gpu.index for gpu in gpus if not gpu.uuid}
    models = {gpu.name for gpu in gpus if gpu.name}
    by_number = any(entry.isdecimal() for entry in named)
    if by_number and len(models) > 1 and env.get(ORDER) != _BY_PLACE and len(chosen) < len(gpus):
        return Choice(everything, migs, missing, sure=False)
    return Choice(tuple(sorted(chosen)), migs, missing)


def judge_choice(described: Finding, gpus: int, mine: Choice, env: Mapping[str, str]) -> Finding:
    """Return what is said of the driver, with the GPUs that are the job's where those are not all."""
    is_known = mine.sure and not mine.missing
    if len(mine.indices) == gpus and is_known:
        return described
    seen = ", ".join(map(str, mine.indices)) or "none"
    evidence = f"{described.evidence}; the job's: {seen}"
    complete = is_known and not any(entry.isdecimal() for entry in entries(env) or ())
    # Those that did not start are others' where each of the job's is named by itself, and is there.
    known = attrs.evolve(described, evidence=evidence, must=described.must and not complete)
    if described.status is Status.FAILED or is_known:
        return known
    cure = f"correct {VISIBLE}"
    if mine.missing:
        evidence += f"; {VISIBLE} names {mine.missing}, which is not here: CUDA ignores it and all after it"
    else:
        evidence += f" at most: which they are by {VISIBLE} only CUDA can tell, as they are of several models"
        cure = f"set {ORDER}=PCI_BUS_ID, or name them by UUID (`nvidia-smi -L`)"
    return attrs.evolve(known, status=Status.DEGRADED, evidence=evidence, cure=cure)


def choice(nvml: Any, gpus: int, env: Mapping[str, str], limit_s: float) -> Choice:
    """Return which of NVML's GPUs are the job's; waits that long for those that are slow to tell who they are."""
    named = entries(env)
    if named is None:
        return Choice(tuple(range(gpus)))
    told: dict[int, Listed | None] = {}
    parents: dict[str, str] = {}
    asks = [partial(_ask_gpu, nvml, index, told) for index in range(gpus)]
    asks += [partial(_ask_parent, nvml, entry, parents) for entry in named if entry.startswith(_MIG)]
    threads = [threading.Thread(target=ask, name="resilience-gpu", daemon=True) for ask in asks]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    known = dict(told)
    openable = [gpu for index in range(gpus) if (gpu := known.get(index, Listed(index))) is not None]
    return choose(env, openable, dict(parents))


def _ask_gpu(nvml: Any, index: int, told: dict[int, Listed | None]) -> None:
    """Take down what a GPU tells of itself; None where this process may not open it."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        told[index] = Listed(index, plain(uuid), plain(name))
    except Exception as error:  # noqa: BLE001 - what ails it its own checks tell
        if code_of(error) == nvml_codes.NO_PERMISSION:
            told[index] = None


def _ask_parent(nvml: Any, entry: str, parents: dict[str, str]) -> None:
    if uuid := old_mig_parent(entry):
        parents[entry] = uuid
        return
    try:
        parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(entry.encode()))
        parents[entry] = plain(nvml.nvmlDeviceGetUUID(parent))
    except Exception:  # noqa: BLE001, S110 - then it names nothing here
        pass


def old_mig_parent(entry: str) -> str:
    """Return the UUID of the GPU in the older name of an instance, `MIG-GPU-<uuid>/<instance>/<instance>`, else ''."""
    return entry.removeprefix(_MIG).partition("/")[0] if entry.startswith(_OLD_MIG) else ""
