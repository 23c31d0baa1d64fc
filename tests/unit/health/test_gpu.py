"""How what a GPU answers is judged, and which GPUs are a job's. The real binding is asked in the integration tests."""

from types import SimpleNamespace

import pytest

from resilience_sdk.attribution.taxonomy import causes
from resilience_sdk.core.words import MIB
from resilience_sdk.health import gpu_checks
from resilience_sdk.health.findings import Status
from resilience_sdk.health.gpu import Choice, Listed, choose, cuda_devices, entries, judge_xid, old_mig_parent
from resilience_sdk.health.gpu_checks import Device
from resilience_sdk.health.probes import GPU, Context


def device(index=0, fields=None, **answers):
    """Return a GPU whose driver gives these answers, and has nothing else; a dict answers by arguments."""

    def answer(value):
        return lambda _handle, *arguments: value[arguments] if isinstance(value, dict) else value

    def values(_handle, asked):
        told = [(fields or {}).get(field) for field in asked]
        return [
            SimpleNamespace(nvmlReturn=3 * (value is None), valueType=1, value=SimpleNamespace(uiVal=value))
            for value in told
        ]

    questions = {f"nvmlDevice{name}": answer(value) for name, value in answers.items()}
    nvml = SimpleNamespace(nvmlMemory_v2=2, nvmlDeviceGetFieldValues=values, **questions)
    return Device(nvml, index, "handle")


def look(check, gpu, **context):
    """Return {check: status} of what is wrong; every one of those must bring evidence and a cure."""
    findings = list(getattr(gpu_checks, check)(gpu, Context(**context)))
    wrong = [finding for finding in findings if finding.is_bad]
    assert all(finding.cure and finding.evidence for finding in wrong), wrong
    assert all(finding.data.get("cause", "unknown") in causes() for finding in wrong)
    return {finding.check: finding.status.value for finding in wrong}


def ecc(mode=(1, 1), uncorrected=0, ever=0, corrected=0, **more):
    """Return the answers of a GPU with ECC."""
    return {"GetEccMode": mode, "GetTotalEccErrors": {(1, 0): uncorrected, (1, 1): ever, (0, 0): corrected}, **more}


def heat(now, slowdown, shutdown):
    """Return the answers of a GPU of that temperature."""
    return {"GetTemperature": now, "GetTemperatureThreshold": {(0,): shutdown, (1,): slowdown, (2,): 95}}


def pages(single, double):
    """Return the retired pages of a GPU, of which none waits for a reset."""
    return {"GetRetiredPages": {(0,): range(single), (1,): range(double)}, "GetRetiredPagesPendingStatus": 0}


def link(generation, reasons):
    """Return a PCIe link of a slot of width 16 and generation 5."""
    now = {"GetCurrPcieLinkWidth": 16, "GetCurrPcieLinkGeneration": generation}
    return {**now, "GetMaxPcieLinkWidth": 16, "GetMaxPcieLinkGeneration": 5, "GetCurrentClocksThrottleReasons": reasons}


def nvlinks(*up, more=()):
    """Return the answers of a GPU with these NVLinks."""
    states = {(number,): state for number, state in enumerate(up)}
    return {"GetNvLinkState": states, "fields": {91: len(up), **dict(more)}}


@pytest.mark.parametrize(
    ("check", "answers", "expected"),
    [
        ("ecc", ecc(), {}),
        # The driver says that nothing need be done; an older one does not say.
        ("ecc", ecc(uncorrected=1, fields={230: 0}), {"ecc_uncorrected_volatile": "degraded"}),
        ("ecc", ecc(uncorrected=1), {"ecc_uncorrected_volatile": "failed"}),
        ("ecc", ecc(ever=9, corrected=10**6), {}),  # only their growth counts
        ("ecc", ecc(mode=(1, 0)), {"ecc_mode": "degraded"}),
        ("ecc", ecc(mode=(0, 0), GetDefaultEccMode=0), {}),  # a workstation's GPU
        ("recovery_action", {"fields": {230: 0}}, {}),
        ("recovery_action", {}, {}),
        ("recovery_action", {"fields": {230: 99}}, {"recovery_action": "failed"}),  # of a newer driver
        ("row_remap", {"GetRemappedRows": (3, 2, 0, 0)}, {}),
        ("retired_pages", pages(14, 0), {}),
        ("retired_pages", pages(10, 5), {"retired_pages": "degraded"}),
        ("temperature", heat(88, 89, 92), {}),
        ("temperature", heat(89, 89, 92), {"temperature": "degraded"}),
        ("temperature", heat(120, 0, 0), {}),  # without a threshold nothing can be said
        ("pcie", link(5, 0), {}),
        ("pcie", link(1, 1), {}),  # links rest while nothing runs
        ("nvlink", nvlinks(*[1] * 18, more={38: 5, 52: 5, 59: 0}), {}),  # CRC errors count by their rate
        ("nvlink", nvlinks(0, 0), {}),  # there may be no bridge at all
        ("nvlink", {}, {}),
    ],
)
def test_what_is_within_the_limits_is_in_order(check, answers, expected):
    """By the driver's own limits where it has some; what is beyond each is planted in the integration tests."""
    assert look(check, device(**answers)) == expected


def test_no_nvlink_at_all_is_told_for_who_looks_again():
    """A link that works at one look and not at another one was lost."""
    found = [next(gpu_checks.nvlink(device(**nvlinks(*states)), Context())) for states in ((1, 1), (0, 0))]
    assert [(finding.status, finding.data["works"]) for finding in found] == [("ok", True), ("unavailable", False)]


@pytest.mark.parametrize(
    ("reasons", "value"),
    [
        (0, "none"),
        (0x1, "idle"),
        (0x4, "power cap"),
        (0x9, "idle"),  # a hardware slowdown while idle is a change of clocks
        (0x8, "hardware slowdown"),
        (0x48, "hardware thermal slowdown"),
        (0xA0, "software thermal slowdown, hardware power brake"),
    ],
)
def test_throttle(reasons, value):
    """Heat and power brakes slow a GPU; being idle and the power cap do not."""
    (finding,) = gpu_checks.throttle(device(GetCurrentClocksThrottleReasons=reasons), Context())
    assert finding.value == value
    assert (finding.status is Status.OK) == (value in ("none", "idle", "power cap"))


@pytest.mark.parametrize(
    ("used_mib", "processes", "own", "status"),
    [
        (400, (), (), "ok"),
        (600, (), (), "degraded"),  # of a container that cannot be seen
        (60_000, ((7, 60_000, "python"),), (), "failed"),
        (60_000, ((7, 60_000, "python"),), (7,), "ok"),
        (60_000, ((7, 50_000, ""), (8, 9_000, "")), (7,), "degraded"),
        (60_000, ((7, None, ""),), (7,), "ok"),  # NVML does not tell whose it is
        (60_000, ((70_007, 60_000, ""),), (7,), "unavailable"),  # in a container the job has other ids
        (60_000, (), (7,), "unavailable"),
        (60_000, ((70_007, 60_000, "python"),), (7,), "failed"),
    ],
)
def test_memory_that_others_hold(machine, used_mib, processes, own, status):
    """What the job's own processes do not use is held by others, seen or unseen; more than half leaves no room."""
    gpu = device(
        GetMemoryInfo=SimpleNamespace(total=80_000 * MIB, used=used_mib * MIB),
        GetComputeRunningProcesses=[
            SimpleNamespace(pid=pid, usedGpuMemory=mib and mib * MIB) for pid, mib, _ in processes
        ],
    )
    root = machine({f"/proc/{pid}/comm": name for pid, _, name in processes if name})
    (finding,) = gpu_checks.memory_held(gpu, Context(root=root, own_pids=own))
    assert finding.status == status
    if finding.is_bad and processes:
        assert f"process {processes[-1][0]}" in finding.evidence


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [(3, 0, ["ok"]), (0, 0, []), (1, 0, ["failed"]), (2, 0, ["failed"]), (3, 9, ["failed"])],
)
def test_fabric(monkeypatch, state, code, status):
    """A GPU of an NVSwitch system must have joined its fabric; others have none."""
    monkeypatch.setattr(gpu_checks.ctypes, "byref", lambda info: info)
    gpu = device(GetGpuFabricInfoV=None)
    gpu.nvml.c_nvmlGpuFabricInfoV_t = lambda: SimpleNamespace(state=state, status=code)
    assert [finding.status.value for finding in gpu_checks.fabric(gpu, Context())] == status


@pytest.mark.parametrize(
    ("number", "status", "cause"),
    [
        (79, "failed", "gpu_fell_off_bus"),
        (48, "failed", "gpu_ecc_uncorrectable"),
        (119, "failed", "gpu_gsp_timeout"),
        (74, "failed", "gpu_nvlink_error"),
        (63, "degraded", "gpu_row_remap_pending"),
        (31, "degraded", "cuda_illegal_memory_access"),
        (7777, "degraded", None),
    ],
)
def test_xid(number, status, cause):
    """The hardware's Xids fail a GPU, those of programs and unknown ones do not."""
    finding = judge_xid("GPU 0", number)
    assert (finding.status, finding.data.get("cause")) == (status, cause)


def test_every_check_can_be_acted_upon():
    """Each has what it looks at, a cure and a source; the cure stands only where something is wrong."""
    for check, row in GPU.checks.items():
        assert all((row.looks_at, row.cure, row.source))
        cures = {status: GPU.found(check, status, subject="GPU 0").cure for status in Status}
        assert {status for status, cure in cures.items() if cure} == {Status.DEGRADED, Status.FAILED}


NODE = [Listed(number, f"GPU-{number}{number}aa", "H100") for number in range(4)]
NAMELESS = [*NODE[:3], Listed(3)]
OPEN = [NODE[1], NODE[3]]
MIXED = [Listed(0, "GPU-a", "T400"), *NODE[1:]]
ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("gpus", "value", "choice", "devices"),
    [
        (NODE, None, Choice(ALL), 4),
        *((NODE, value, Choice(()), 0) for value in ("", "-1", "NoDevFiles", "1,1")),  # one that is named twice is none
        (NODE, "3, 1", Choice((1, 3)), 2),
        (NODE, "0,-1,2", Choice((0,)), 1),
        (NODE, "GPU-22,GPU-00aa", Choice((0, 2)), 2),
        (NODE, "MIG-7", Choice((2,), {2: "MIG-7"}), 1),
        # What names nothing ends the list, for CUDA too; a GPU that does not tell its name may be the one meant.
        (NODE, "0,4,1", Choice((0,), missing="4"), 1),
        (NODE, "MIG-7,MIG-8", Choice((2,), {2: "MIG-7"}, missing="MIG-8"), 1),
        (NODE, "GPU-2,GPU-9", Choice((2,), missing="GPU-9"), 2),
        (NAMELESS, "GPU-2,GPU-9", Choice((2, 3), missing="GPU-9"), 2),
        # Numbers count what the process may open: a scheduler hides the GPUs of other jobs.
        (OPEN, "0,1", Choice((1, 3)), 2),
        (OPEN, "1", Choice((3,)), 1),
        # The order of several models is CUDA's secret, unless all are visible.
        (MIXED, "0", Choice(ALL, sure=False), 1),
        (MIXED, "3,2,1,0", Choice(ALL), 4),
        (MIXED, "GPU-a", Choice((0,)), 1),
    ],
)
def test_what_is_visible(gpus, value, choice, devices):
    """By number, by the beginning of a name, by the name of an instance; and how many devices a process has."""
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert choose(env, gpus, {"MIG-7": "GPU-22aa"}) == choice
    assert cuda_devices(env, 4) == devices


def test_by_their_place_on_the_bus_models_do_not_matter():
    """Then CUDA counts as NVML does."""
    env = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert choose(env, MIXED, {}) == Choice((0,))


def test_the_older_name_of_an_instance_has_its_gpu():
    """The newer one has to be looked up."""
    assert (old_mig_parent("MIG-GPU-22aa/1/0"), old_mig_parent("MIG-7")) == ("GPU-22aa", "")
    assert entries({"CUDA_VISIBLE_DEVICES": "MIG-GPU-22aa/1/0"}) == ["MIG-GPU-22aa/1/0"]
