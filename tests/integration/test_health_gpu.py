"""The GPU probe through the real NVML binding: against a library that stands in for the driver, and against a driver.

The tests marked `gpu` ask the driver of the machine that they run on.
"""

import os
import re
import shlex
import subprocess
import sys
import time

import attrs
import psutil
import pytest
from harness import PROJECT
from stub_driver import StubDriver

from resilience_sdk.health import runner
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import GPU, GPU_EVENTS, Context
from resilience_sdk.health.runner import run_probes
from resilience_sdk.health.watch import HealthWatch

_DRIVER = "/proc/driver/nvidia/version"
_A_DRIVER = [
    pytest.mark.gpu,
    pytest.mark.skipif(not os.path.exists(_DRIVER), reason=f"no NVIDIA driver on this machine (no {_DRIVER})"),
]
_BAD = (Status.DEGRADED, Status.FAILED)


@pytest.fixture
def stub(stub_library, tmp_path, monkeypatch) -> StubDriver:
    """A healthy node with three GPUs that are not there."""
    driver = StubDriver(stub_library, tmp_path / "state").changed({"gpus": 3})
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    return driver


@pytest.fixture(params=["stub", pytest.param("driver", marks=_A_DRIVER)])
def node(request) -> str:
    """A node with GPUs: of the stub, or of the machine's own driver."""
    if request.param == "stub":
        request.getfixturevalue("stub")
    return request.param


def _look(deadline_s: float = 15.0, **context) -> list[Finding]:
    return run_probes([attrs.evolve(GPU, deadline_s=deadline_s)], Context(listen_s=0.05, **context))


def _bad(findings) -> dict[tuple[str, str], Finding]:
    """Return what is wrong by subject and check; each must say what was seen and what to do."""
    wrong = {(finding.subject, finding.check): finding for finding in findings if finding.status in _BAD}
    assert all(finding.evidence and finding.cure for finding in wrong.values())
    return wrong


def _seen(findings, subject: str) -> set[str]:
    return {finding.check for finding in findings if finding.subject == subject}


def test_every_gpu_answers(node):
    """Each GPU tells who it is, and versions are there to be compared between nodes."""
    findings = _look()
    (driver,) = [finding for finding in findings if finding.check == "driver"]
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", driver.data["driver"])
    assert re.fullmatch(r"\d+\.\d+", driver.data["cuda"])
    answers = [finding for finding in findings if finding.check == "answers"]
    assert {finding.subject for finding in answers} == {f"GPU {index}" for index in range(driver.data["gpus"])}
    for finding in answers:
        assert finding.status is Status.OK, finding
        assert finding.data["uuid"].startswith("GPU-")
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", finding.data["pci"])
    assert {finding.check for finding in findings} <= set(GPU.checks)
    assert all(finding.cure == "" for finding in findings if finding.status not in _BAD)


def test_two_looks_at_a_healthy_node_show_no_growth(node):
    """Nothing that a look does itself counts as a change."""
    watch = HealthWatch()
    watch.take(_look(), 0.0)
    assert watch.take(_look(), 1.0) == []


def test_a_healthy_node_has_nothing_wrong(stub):
    """The stub's GPUs are in order, and all that can be asked was asked."""
    findings = _look()
    assert _bad(findings) == {}
    asked = _seen(findings, "GPU 2")
    assert {"ecc_uncorrected_volatile", "row_remap_pending", "nvlink_down", "pcie_width", "throttle"} <= asked
    assert {"temperature", "power_limit", "memory_held", "fabric", "recovery_action", "inforom"} <= asked
    (answer,) = [finding for finding in findings if finding.check == "answers" and finding.subject == "GPU 2"]
    assert answer.evidence.endswith("does not tell: retired_pages")


UUID = "GPU-00000000-0000-0000-0000-00000000000"
MIG = "MIG-00000000-0000-0000-0000-00000000000"
_HELD = {"memory_used_mib": 60000, "process": 1}


@pytest.mark.parametrize(("visible", "asked"), [("0,1", {0, 1}), (f"{UUID}1", {1}), (f"{MIG}1", {1})])
def test_what_others_hold_on_gpus_that_the_job_does_not_see_is_not_looked_at(stub, visible, asked):
    """On a node that several jobs share."""
    others = set(range(3)) - asked
    stub.changed({f"{gpu}.{key}": value for gpu in others for key, value in _HELD.items()})
    part = 100 * visible.startswith("MIG")
    if part:  # the other parts of a GPU are others', too
        stub.changed({"1.mig": 1, **{f"1.{key}": value for key, value in _HELD.items()}})
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    findings = _look(environment=environment)
    assert _bad(findings) == {}
    assert {finding.subject for finding in findings if finding.check == "answers"} == {f"GPU {n}" for n in asked}
    stub.changed({f"{1 + part}.{key}": value for key, value in _HELD.items()})
    assert set(_bad(_look(environment=environment))) == {("GPU 1", "memory_held")}


@pytest.mark.slow
def test_a_gpu_that_does_not_answer_is_others_where_each_of_the_jobs_does(stub):
    """By number it may be the job's, as those behind it move up."""
    stub.changed({"1.error": 15})
    assert _bad(_look(environment={"CUDA_VISIBLE_DEVICES": f"{UUID}0,{UUID}2"})) == {}
    assert ("GPU 1", "answers") in _bad(_look(environment={"CUDA_VISIBLE_DEVICES": f"{UUID}0,GPU-1"}))
    stub.changed({"1.error": 4})  # not permitted: a scheduler gives each job GPUs of its own
    findings = _look(environment={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert _bad(findings) == {}
    assert {finding.subject for finding in findings if finding.check == "answers"} == {"GPU 0", "GPU 2"}
    assert _bad(_look()) == {}


@pytest.mark.slow
def test_where_only_cuda_can_tell_nothing_stops_the_job(stub):
    """GPUs of two models, of which some are named by number, and CUDA counts the fastest first."""
    stub.changed({"0.name": "NVIDIA T400", **{f"0.{key}": value for key, value in _HELD.items()}})
    environment = {"CUDA_VISIBLE_DEVICES": "0,1"}
    found = _bad(_look(environment=environment))
    assert not found[("GPU 0", "memory_held")].stops
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found[("", "driver")].cure
    found = _bad(_look(environment={**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
    assert found[("GPU 0", "memory_held")].stops
    stub.changed({"0.nvmlDeviceGetTotalEccErrors": "hang"})
    hung = _bad(_look(deadline_s=4.0, environment=environment))[("GPU 0", "answers")]
    assert "has not returned" in hung.evidence
    assert not hung.stops


@pytest.mark.slow
def test_errors_that_grow_are_told_by_how_much(stub):
    """One uncorrectable error more than a minute ago is told, though the driver asks for nothing yet."""
    stub.changed({"1.ecc_uncorrected_ever": 4, "1.ecc_corrected": 100})
    watch = HealthWatch()
    assert watch.take(_look(), 0.0) == []
    stub.changed({"1.ecc_uncorrected_ever": 5, "1.ecc_corrected": 105, "1.field.59": 0})
    (worse,) = watch.take(_look(), 60.0)
    assert (worse.subject, worse.check) == ("GPU 1", "ecc_uncorrected_aggregate")
    assert worse.evidence == "grew by 1 to 5 within 60 s"
    stub.changed({"1.ecc_corrected": 200})
    worse, over = watch.take(_look(), 60.0)
    assert (over.check, over.status) == ("ecc_uncorrected_aggregate", Status.OK)
    assert "grew by 95 to 200 within 60 s, at most 10 a minute" in worse.evidence


# (answers of one GPU, the check that finds it, what the cure must say)
_FAULTS: list[tuple[dict[str, object], str, str]] = [
    ({"ecc_uncorrected": 2, "field.230": 4}, "ecc_uncorrected_volatile", "nvidia-smi --gpu-reset -i N"),
    ({"field.230": 2}, "recovery_action", "reboot the node"),
    ({"remap_failure": 1}, "row_remap_failure", "replacement"),
    ({"remap_pending": 1}, "row_remap_pending", "after the job"),
    ({"retired_single": 4, "retired_double": 60}, "retired_pages", "dcgmi diag"),
    ({"retired_single": 1, "retired_pending": 1}, "retired_pages_pending", "after the job"),
    ({"nvmlDeviceValidateInforom": 14}, "inforom", "replacement"),
    ({"ecc": 0}, "ecc_mode", "nvidia-smi -e 1 -i N"),
    ({"temperature": 90}, "temperature", "cooling"),
    ({"field.82": 96}, "memory_temperature", "cooling"),
    ({"throttle": 0x48}, "throttle", "cooling"),
    ({"throttle": 0x80}, "throttle", "power supply"),
    ({"power_limit_mw": 300000}, "power_limit", "nvidia-smi -i N -pl"),
    ({"memory_used_mib": 60000, "process": 1}, "memory_held", "end those processes"),
    ({"pcie_width": 8}, "pcie_width", "reseat"),
    ({"pcie_generation": 3, "throttle": 4}, "pcie_generation", "BIOS"),
    ({"link_down.7": 1}, "nvlink_down", "fabric manager"),
    ({"field.59": 3}, "nvlink_recoveries", "nvidia-smi --gpu-reset -i N"),
    ({"field.162": 1}, "nvlink_recoveries", "nvidia-smi --gpu-reset -i N"),
    ({"fabric": 2}, "fabric", "nvidia-fabricmanager"),
    ({"error": 15}, "answers", "leave the node out"),
    ({"error": 16}, "answers", "nvidia-smi --gpu-reset -i N"),
    ({"nvmlDeviceGetTemperature": 10}, "answers", "119"),
    ({"nvmlDeviceGetName": 999}, "answers", "leave the node out"),
]
# What the taxonomy calls the fault of a GPU that no longer answers, so that it meets the incident that it explains
_CAUSES = ["gpu_fell_off_bus", "gpu_hang", "gpu_gsp_timeout", "gpu_gsp_timeout"]


def test_each_planted_fault_is_found_on_its_gpu_alone(stub):
    """A node on which every GPU but the last has another fault: each is found where it is, with its cure."""
    healthy = len(_FAULTS)
    stub.changed({"gpus": healthy + 1})
    for index, (answers, _, _) in enumerate(_FAULTS):
        stub.changed({f"{index}.{name}": value for name, value in answers.items()})
    findings = _look()
    wrong = _bad(findings)
    for index, (answers, check, cure) in enumerate(_FAULTS):
        subject = f"GPU {index}"
        found = {name for gpu, name in wrong if gpu == subject}
        # What the driver asks for is told beside why it asks.
        assert found - ({"recovery_action"} if len(answers) > 1 else set()) == {check}, answers
        assert cure.replace("-i N", f"-i {index}") in wrong[subject, check].cure
    silent = [finding for (_, check), finding in wrong.items() if check == "answers"]
    assert all(finding.stops for finding in silent)
    assert sorted(finding.data["cause"] for finding in silent) == sorted(_CAUSES)
    assert not [subject for subject, _ in wrong if subject == f"GPU {healthy}"]
    assert "answers" in _seen(findings, f"GPU {healthy}")


def test_each_xid_event_is_a_finding(stub):
    """A program's Xid is told and held against no GPU; those that come while somebody listens are heard."""
    stub.changed({"xid.0": "0:13", "xid.1": "2:79", "xid.2": "2:45"})
    heard = [(finding.subject, finding.value, finding.stops) for finding in _look() if finding.check == "xid"]
    assert heard == [("GPU 0", 13, False), ("GPU 2", 79, True), ("GPU 2", 45, False)]


def test_an_xid_of_a_gpu_that_the_job_does_not_see_is_others(stub):
    """Also for the watch, which listens while it has nothing else to do."""
    stub.changed({"xid.0": "0:79", "xid.1": "2:79"})
    for visible, subjects in (("1,2", ["GPU 2"]), ("1", [""]), ("-1", [])):
        context = Context(listen_s=0.05, environment={"CUDA_VISIBLE_DEVICES": visible})
        heard = [(finding.check, finding.subject) for finding in run_probes([GPU_EVENTS], context)]
        assert heard == [("xid", subject) for subject in subjects]


@pytest.mark.slow
def test_a_call_that_sleeps_for_ever_delays_no_other_gpu(stub):
    """The GPU whose driver call never returns is named with the call; the others are asked to the end."""
    stub.changed({"1.nvmlDeviceGetTotalEccErrors": "hang"})
    started = time.monotonic()
    findings = _look(deadline_s=8.0)
    took = time.monotonic() - started
    wrong = _bad(findings)
    assert set(wrong) == {("GPU 1", "answers")}
    assert wrong["GPU 1", "answers"].evidence.startswith("nvmlDeviceGetTotalEccErrors has not returned within")
    assert wrong["GPU 1", "answers"].stops
    assert _seen(findings, "GPU 0") == _seen(findings, "GPU 2") > _seen(findings, "GPU 1")
    assert "row_remap_pending" in _seen(findings, "GPU 1")  # what it answered before is kept
    assert took < 16.0  # the others wait for no second deadline


def _children() -> list[str]:
    """Return what this process still has of probes: running, or dead and not collected."""
    mine = psutil.Process().children(recursive=True)
    return [
        str(child)
        for child in mine
        if child.status() == psutil.STATUS_ZOMBIE or "health.probe_main" in str(child.cmdline())
    ]


@pytest.mark.parametrize(
    ("end", "evidence"),
    [("crash", r"was killed by SIGSEGV in pynvml\.py:\d+ nvmlDeviceGetName"), ("exit", "left with 3")],
)
def test_a_call_that_ends_the_process_is_a_finding(stub, end, evidence):
    """A crash in the driver's library costs one process, which is not ours; it says in which call."""
    stub.changed({"1.nvmlDeviceGetName": end})
    findings = _look()
    (finding,) = _bad(findings).values()
    assert re.search(evidence, finding.evidence)
    assert finding.stops
    assert "driver" in _seen(findings, "")  # what was told before


@pytest.mark.slow
def test_a_driver_that_hangs_at_once_delays_no_probe_beside_it(stub):
    """Not even the number of GPUs is told: two such probes take as long as one, and leave no process."""
    stub.changed({"nvmlInitWithFlags": "hang"})
    hanging = attrs.evolve(GPU, deadline_s=6.0)
    quick = attrs.evolve(GPU, name="quick", function="resilience_sdk.health.nothing.there:probe")
    started = time.monotonic()
    first, beside, second = run_probes([hanging, quick, attrs.evolve(hanging, only="again")], Context())
    assert time.monotonic() - started < 11.9
    assert (first.probe, first.subject, second.subject) == ("gpu", "", "again")
    for hung in (first, second):
        assert hung.stops
        assert re.match(r"no answer within 6 s, stuck in pynvml\.py:\d+ nvmlInitWithFlags", hung.evidence)
        assert hung.cure == GPU.cure
    assert beside.status is Status.UNAVAILABLE
    assert "No module named 'resilience_sdk.health.nothing'" in beside.evidence
    assert _children() == []


def test_the_limit_of_the_caller_counts(stub):
    """Who has less time than the probes gets what is there by then."""
    stub.changed({"nvmlInitWithFlags": "hang"})
    started = time.monotonic()
    (finding,) = run_probes([GPU], Context(), limit_s=1.0)
    assert time.monotonic() - started < GPU.deadline_s
    assert finding.value == 1.0


def test_a_process_that_does_not_go_is_collected_later(stub, monkeypatch):
    """What is not gone a moment after its SIGKILL, as in D state, is left alone, and collected at the next look."""
    monkeypatch.setattr(runner, "_KILL_GRACE_S", 0.0)
    stub.changed({"nvmlInitWithFlags": "hang"})
    others = psutil.Process().children()  # of tests before, such as the resource tracker of multiprocessing
    (finding,) = run_probes([GPU], Context(), limit_s=0.5)
    assert finding.stops
    for child in {*psutil.Process().children()} - {*others}:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it dies, and stays to be collected
    assert run_probes([], Context()) == []
    assert _children() == []


def test_a_machine_without_descriptors_still_answers():
    """Each probe that cannot be started says so, with the cure; that is what a low `ulimit -n` looks like."""
    code = (
        "from resilience_sdk.health.runner import run_probes; from resilience_sdk.health.probes import GPU, Context\n"
        "for finding in run_probes([GPU, GPU], Context()): print(finding.status.value, finding.evidence, finding.cure)"
    )
    command = f"ulimit -n 7; exec {shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True, cwd=PROJECT)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.match(r"unavailable its process could not be started: .*Too many open files .*`ulimit -n`", line)


@pytest.mark.parametrize(
    ("answers", "status", "evidence"),
    [
        ({"nvmlInitWithFlags": 9}, "unavailable", "no NVIDIA GPU on this node"),
        ({"gpus": 0}, "unavailable", "0 GPUs"),
        ({"nvmlInitWithFlags": 18}, "failed", "its kernel module are of different versions"),
        ({"nvmlInitWithFlags": 999}, "failed", "NVML cannot start"),
    ],
)
def test_a_driver_that_does_not_start_says_why(stub, answers, status, evidence, tmp_path):
    """No driver on a node without GPUs is well; one that does not fit its kernel module is not."""
    stub.changed(answers)
    (finding,) = _look(root=str(tmp_path))
    assert finding.status == status
    assert evidence in finding.evidence
    assert bool(finding.cure) == (status == "failed")


def _plug_in_a_gpu(root):
    device = root / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")


def test_a_gpu_without_a_driver_is_named(stub_library, tmp_path, monkeypatch):
    """The bus shows a GPU: that its driver is not loaded is a fault; that it is not installed may be meant."""
    _plug_in_a_gpu(tmp_path)
    if not os.path.exists(_DRIVER):
        (finding,) = _look(root=str(tmp_path))
        assert finding.status is Status.UNAVAILABLE
        assert "no NVIDIA driver" in finding.evidence
        assert "0000:3b:00.0" in finding.evidence
    for name, value in (
        StubDriver(stub_library, tmp_path / "state").changed({"nvmlInitWithFlags": 9}).environment.items()
    ):
        monkeypatch.setenv(name, value)
    (finding,) = _look(root=str(tmp_path))
    assert finding.stops
    assert "the PCI bus shows 1 NVIDIA GPU (0000:3b:00.0)" in finding.evidence
    assert "modprobe nvidia" in finding.cure


def test_a_gpu_that_did_not_start_is_missed(stub, tmp_path):
    """The kernel driver took over four GPUs, NVML has three."""
    for bus in ("3b", "3c", "3d", "3e"):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}:00.0").mkdir(parents=True)
    (finding,) = _bad(_look(root=str(tmp_path))).values()
    assert finding.check == "driver"
    assert "though the kernel driver has 4: 1 did not start" in finding.evidence


def test_the_jobs_own_processes_hold_no_memory_of_others(stub):
    """During a run the memory of its own ranks is theirs."""
    stub.changed({"1.memory_used_mib": 60000, "1.process": os.getpid()})
    (finding,) = _bad(_look()).values()
    assert f"process {os.getpid()} (" in finding.evidence
    assert _bad(_look(own_pids=(os.getpid(),))) == {}


@pytest.mark.slow
@pytest.mark.parametrize("is_rank", [True, False])
def test_a_preflight_from_within_a_job_knows_its_own(stub, tmp_path, is_rank):
    """A rank that asks after another one has its model on the GPU: that one's memory is held by the job."""
    code = "import sys; from resilience_sdk import health; r = health.preflight(sys.argv[1]); " \
        "print(*[f.status.value for f in r.findings if (f.check, f.subject) == ('memory_held', 'GPU 1')])"  # fmt: skip
    with subprocess.Popen(["sleep", "600"]) as sibling:
        stub.changed({"1.memory_used_mib": 60000, "1.process": sibling.pid})
        variables = {"RANK": "0", "WORLD_SIZE": "2"} if is_rank else {}
        asked = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run")],
            env={**os.environ, **variables}, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        sibling.kill()
    assert asked.stdout.strip() == ("ok" if is_rank else "failed")


def test_an_older_driver_is_asked_what_it_knows(stub):
    """What a driver does not have is named, not held against the GPU."""
    for call in ("nvmlDeviceGetFieldValues", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetCurrentClocksEventReasons"):
        stub.changed({f"0.{call}": 13})
    stub.changed({"0.nvmlDeviceGetEccMode": 4, "0.nvmlDeviceGetMemoryInfo_v2": 13})
    findings = _look()
    assert _bad(findings) == {}
    (answer,) = [finding for finding in findings if finding.check == "answers" and finding.subject == "GPU 0"]
    assert "ecc (not allowed)" in answer.evidence
    assert "nvlink, fabric" in answer.evidence
    assert "throttle" in _seen(findings, "GPU 0")
