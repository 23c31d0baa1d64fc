"""How each reading of a GPU is judged."""

import pytest

from resilience_sdk.attribution.taxonomy import causes
from resilience_sdk.health.findings import Status
from resilience_sdk.health.gpu import load, memory
from resilience_sdk.health.gpu.driver import judge_driver
from resilience_sdk.health.gpu.events import judge_xid
from resilience_sdk.health.gpu.links import NvLinks, Pcie, judge_fabric, judge_nvlinks, judge_pcie
from resilience_sdk.health.gpu.rules import RULES, found

_HEALTHY = memory.Ecc(on=True, on_after_reset=True, corrected=0, uncorrected=0, uncorrected_ever=0, recovery_action=0)
_MIB = 1 << 20


def _bad(findings):
    """Return {check: status} of what is wrong; every one of those must bring evidence and a cure."""
    wrong = [finding for finding in findings if finding.status in (Status.DEGRADED, Status.FAILED)]
    assert all(finding.cure and finding.evidence for finding in wrong), wrong
    assert all(finding.data.get("cause", "unknown") in causes() for finding in wrong)
    return {finding.check: finding.status.value for finding in wrong}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"uncorrected": 1}, {"ecc_uncorrected_volatile": "degraded"}),  # the driver says that nothing need be done
        ({"uncorrected": 1, "recovery_action": None}, {"ecc_uncorrected_volatile": "failed"}),  # an older driver
        ({"uncorrected": 1, "recovery_action": 1}, {"ecc_uncorrected_volatile": "failed"}),
        ({"uncorrected_ever": 9, "corrected": 10**6}, {}),  # only their growth counts
        ({"on": False, "uncorrected": None}, {"ecc_mode": "degraded"}),
        ({"on_after_reset": False}, {"ecc_mode": "degraded"}),
        ({"on": False, "on_after_reset": False, "on_by_default": False}, {}),  # a workstation's GPU
    ],
)
def test_ecc(change, expected):
    """Uncorrectable errors since the driver was loaded, and a mode that somebody changed."""
    ecc = {**{name: getattr(_HEALTHY, name) for name in memory.Ecc.__slots__ if name != "__weakref__"}, **change}
    assert _bad(memory.judge_ecc("GPU 0", memory.Ecc(**ecc))) == expected


def test_what_the_driver_asks_for_is_the_cure():
    """Every recovery action stops a job and says what to do; those of newer drivers too."""
    assert _bad(memory.judge_recovery_action("GPU 0", 0)) == {}
    assert list(memory.judge_recovery_action("GPU 0", None)) == []
    (reset,) = memory.judge_recovery_action("GPU 2", 1)
    assert reset.stops
    assert reset.cure.endswith("`nvidia-smi --gpu-reset -i 2`")
    (unheard,) = memory.judge_recovery_action("GPU 2", 99)
    assert unheard.stops
    assert unheard.value == "action 99"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((3, 2, 0, 0), {}),
        ((0, 1, 1, 0), {"row_remap_pending": "degraded"}),
        ((0, 9, 1, 1), {"row_remap_pending": "degraded", "row_remap_failure": "failed"}),
    ],
)
def test_remapped_rows(rows, expected):
    """Remapped rows are how it should be; a pending one waits for a reset, a failed one is the end."""
    assert _bad(memory.judge_remapped_rows("GPU 0", rows)) == expected


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ((14, 0, 0), {}),
        ((10, 5, 0), {"retired_pages": "degraded"}),
        ((0, 60, 0), {"retired_pages": "failed"}),
        ((0, 1, 1), {"retired_pages_pending": "degraded"}),
    ],
)
def test_retired_pages(pages, expected):
    """15 are to be watched, 60 end the GPU."""
    assert _bad(memory.judge_retired_pages("GPU 0", pages)) == expected


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
    (finding,) = load.judge_throttle("GPU 0", reasons)
    assert finding.value == value
    assert (finding.status is Status.OK) == (value in ("none", "idle", "power cap"))


def test_heat_is_judged_by_the_drivers_own_thresholds():
    """At the slowdown threshold it is too hot; without any threshold nothing can be said."""
    assert _bad(load.judge_heat("GPU 0", load.Heat(gpu=88, slowdown=89, shutdown=92))) == {}
    assert _bad(load.judge_heat("GPU 0", load.Heat(gpu=89, slowdown=89, shutdown=92))) == {"temperature": "degraded"}
    assert _bad(load.judge_heat("GPU 0", load.Heat(gpu=120))) == {}
    hot_memory = load.Heat(gpu=50, memory=95, memory_max=95)
    assert _bad(load.judge_heat("GPU 0", hot_memory)) == {"memory_temperature": "degraded"}


def test_a_lower_power_limit_makes_a_straggler():
    """A limit below the default is told; the power used is not held against it."""
    assert _bad(load.judge_power("GPU 0", (690.0, 700.0, 700.0))) == {}
    (finding,) = load.judge_power("GPU 5", (290.0, 300.0, 700.0))
    assert finding.status is Status.DEGRADED
    assert "nvidia-smi -i 5 -pl" in finding.cure


@pytest.mark.parametrize(
    ("used_mib", "processes", "own", "status"),
    [
        (400, (), (), "ok"),
        (600, (), (), "degraded"),  # of a container that cannot be seen
        (60_000, ((7, 60_000 * _MIB, "python"),), (), "failed"),
        (60_000, ((7, 60_000 * _MIB, "python"),), (7,), "ok"),
        (60_000, ((7, 50_000 * _MIB, ""), (8, 9_000 * _MIB, "")), (7,), "degraded"),
        (60_000, ((7, None, ""),), (7,), "ok"),  # NVML does not tell whose it is
        (60_000, ((70_007, 60_000 * _MIB, ""),), (7,), "unavailable"),  # in a container the job has other ids
        (60_000, (), (7,), "unavailable"),
        (60_000, ((70_007, 60_000 * _MIB, "python"),), (7,), "failed"),
    ],
)
def test_memory_that_others_hold(used_mib, processes, own, status):
    """What the job's own processes do not use is held by others, seen or unseen; more than half leaves no room."""
    held = load.Held(total=80_000 * _MIB, used=used_mib * _MIB, processes=processes, own_pids=frozenset(own))
    (finding,) = load.judge_memory("GPU 0", held)
    assert finding.status == status
    if status in ("degraded", "failed") and processes:
        assert f"process {processes[-1][0]}" in finding.evidence


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (Pcie(width=16, widest=16, generation=5, highest=5, idle=False), {}),
        (Pcie(width=8, widest=16, generation=5, highest=5, idle=True), {"pcie_width": "degraded"}),
        (Pcie(width=16, widest=16, generation=1, highest=5, idle=True), {}),  # links rest while nothing runs
        (Pcie(width=16, widest=16, generation=4, highest=5, idle=False), {"pcie_generation": "degraded"}),
    ],
)
def test_pcie(link, expected):
    """A link that is narrower or, at work, slower than GPU and slot can."""
    assert _bad(judge_pcie("GPU 0", link)) == expected


def test_nvlinks():
    """One link down among others is a fault, none up is no NVLink at all; CRC errors count by their rate only."""
    up = tuple(range(18))
    assert _bad(judge_nvlinks("GPU 0", NvLinks(up=up, down=(), crc=5, replays=5, recoveries=0))) == {}
    assert _bad(judge_nvlinks("GPU 0", NvLinks(up=up[1:], down=(0,)))) == {"nvlink_down": "failed"}
    assert _bad(judge_nvlinks("GPU 0", NvLinks(up=up, down=(), recoveries=3))) == {"nvlink_recoveries": "degraded"}
    (alone,) = judge_nvlinks("GPU 0", NvLinks(up=(), down=up))
    assert alone.status is Status.UNAVAILABLE
    assert list(judge_nvlinks("GPU 0", None)) == []


@pytest.mark.parametrize(
    ("fabric", "status"),
    [((3, 0), ["ok"]), ((0, 0), []), ((1, 0), ["failed"]), ((2, 0), ["failed"]), ((3, 999), ["failed"])],
)
def test_fabric(fabric, status):
    """A GPU of an NVSwitch system must have joined its fabric; others have none."""
    assert [finding.status.value for finding in judge_fabric("GPU 0", fabric)] == status


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
    assert finding.status == status
    assert finding.data.get("cause") == cause


def test_a_gpu_that_did_not_start_is_missed():
    """NVML has fewer GPUs than the kernel driver took over: one has left."""
    versions = {"driver": "575.57.08", "nvml": "12", "cuda": "12.9"}
    assert judge_driver(8, 8, versions).status is Status.OK
    assert judge_driver(8, 0, versions).status is Status.OK  # /proc tells nothing
    missing = judge_driver(7, 8, versions)
    assert missing.stops
    assert "1 did not start" in missing.evidence
    assert judge_driver(0, 0, versions).status is Status.UNAVAILABLE


def test_every_rule_can_be_acted_upon():
    """Each has a name of its own, what it looks at, a cure and a source."""
    for check, rule in RULES.items():
        assert check == rule.check
        assert all((rule.looks_at, rule.cure, rule.source))


def test_nothing_wrong_has_no_cure():
    """A cure stands only where something is wrong."""
    for check in RULES:
        assert found(check, "GPU 0", Status.OK).cure == ""
        assert found(check, "GPU 0", Status.UNAVAILABLE).cure == ""
        assert found(check, "GPU 0", Status.FAILED).cure
