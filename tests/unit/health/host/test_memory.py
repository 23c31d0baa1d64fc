"""Memory, kills for it, and /dev/shm, from files of machines that are not this one."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.health import grading
from resilience_sdk.health.findings import Status
from resilience_sdk.health.grading import GIB, MIB
from resilience_sdk.health.host import memory

MEMINFO = "MemTotal:       {total} kB\nMemFree:        1 kB\nMemAvailable:   {available} kB\n"


def meminfo(total_gib, available_gib):
    """Return /proc/meminfo of a machine."""
    return MEMINFO.format(total=int(total_gib * 2**20), available=int(available_gib * 2**20))


def test_what_is_available_is_told_with_its_limit(machine):
    """Without control groups it is the machine's."""
    (found,) = memory.memory(machine({"/proc/meminfo": meminfo(64, 32)}))
    assert (found.status, found.value, found.cure) == (Status.OK, 32 * GIB, "")
    assert "the machine's memory" in found.evidence


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (
            "0::/job/step\n",
            {"job/step/memory.max": "max", "job/memory.max": 2 * GIB, "job/memory.current": 2 * GIB - 100 * MIB},
        ),
        (
            "4:memory:/job\n0::/\n",
            {"memory/job/memory.limit_in_bytes": 2 * GIB, "memory/job/memory.usage_in_bytes": 2 * GIB - 100 * MIB},
        ),
    ],
    ids=["version 2, the limit of a parent", "version 1"],
)
def test_a_control_group_limits_what_is_available(machine, cgroup, files):
    """Plenty of memory in the machine does not help a container that has used its own."""
    root = machine(
        {"/proc/meminfo": meminfo(64, 60), "/proc/self/cgroup": cgroup}
        | {f"/sys/fs/cgroup/{name}": text for name, text in files.items()}
    )
    (found,) = memory.memory(root)
    assert (found.status, found.value, found.stops) == (Status.FAILED, 100 * MIB, True)
    assert "control group" in found.evidence
    assert "--mem" in found.cure


def test_a_parent_that_others_fill_limits_us_too(machine):
    """Our own group has a smaller limit, and more left of it."""
    root = machine(
        {
            "/proc/meminfo": meminfo(64, 60),
            "/proc/self/cgroup": "0::/pod/ours\n",
            "/sys/fs/cgroup/pod/memory.max": 32 * GIB,
            "/sys/fs/cgroup/pod/memory.current": 31 * GIB,
            "/sys/fs/cgroup/pod/ours/memory.max": 8 * GIB,
            "/sys/fs/cgroup/pod/ours/memory.current": 2 * GIB,
        }
    )
    (found,) = memory.memory(root)
    assert found.value == GIB
    assert found.evidence.endswith("cgroup/pod")


def test_page_cache_can_be_taken_back(machine):
    """A group that is full of cached files has memory left."""
    root = machine(
        {
            "/proc/meminfo": meminfo(64, 60),
            "/proc/self/cgroup": "0::/\n",
            "/sys/fs/cgroup/memory.max": 8 * GIB,
            "/sys/fs/cgroup/memory.current": 8 * GIB,
            "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {4 * GIB}\n",
        }
    )
    (found,) = memory.memory(root)
    assert (found.status, found.value) == (Status.OK, 4 * GIB)


@pytest.mark.parametrize(
    ("version", "statistics"),
    [
        (2, f"anon 1\ninactive_file {GIB}\nactive_file {5 * GIB}\n"),
        (1, f"active_file 1\ninactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {5 * GIB}\n"),
    ],
)
def test_the_cache_of_files_that_are_read_again_and_again_can_be_taken_back(machine, version, statistics):
    """A training reads its data in every epoch: most of a full group is such cache, for which no job is refused."""
    place = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/memory"
    most, used = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    root = machine(
        {
            "/proc/meminfo": meminfo(64, 60),
            "/proc/self/cgroup": "0::/\n" if version == 2 else "4:memory:/\n",
            f"{place}/memory.{most}": 8 * GIB,
            f"{place}/memory.{used}": 8 * GIB,
            f"{place}/memory.stat": statistics,
        }
    )
    (found,) = memory.memory(root)
    assert (found.status, found.value) == (Status.OK, 6 * GIB)


def test_a_limit_of_nobody_is_none(machine):
    """Version 1 writes a huge number where nothing is limited."""
    root = machine(
        {
            "/proc/meminfo": meminfo(64, 60),
            "/proc/self/cgroup": "4:memory:/\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        }
    )
    (found,) = memory.memory(root)
    assert found.value == 60 * GIB


def test_without_proc_memory_is_unavailable(machine):
    """As on a platform that has none."""
    (found,) = memory.memory(machine({}))
    assert (found.status, found.must) == (Status.UNAVAILABLE, False)


def test_a_kill_in_our_group_counts_and_one_elsewhere_does_not(machine):
    """Other jobs on a shared node are no reason to distrust it."""
    files = {"/proc/self/cgroup": "0::/job\n", "/proc/vmstat": "oom_kill 8\n"}
    (calm,) = memory.oom_kills(machine(files | {"/sys/fs/cgroup/job/memory.events": "low 0\noom 0\noom_kill 0\n"}))
    (killed,) = memory.oom_kills(machine(files | {"/sys/fs/cgroup/job/memory.events": "low 0\noom 3\noom_kill 2\n"}))
    assert (calm.status, calm.data["control_group"], calm.data["machine"]) == (Status.OK, 0, 8)
    assert (killed.status, killed.value) == (Status.DEGRADED, 2)
    assert "fewer DataLoader workers" in killed.cure


def test_the_real_dev_shm_is_measured():
    """As statvfs sees it."""
    info = os.statvfs("/dev/shm")
    (found,) = memory.shared_memory()
    assert found.data["total"] == info.f_blocks * info.f_frsize


def test_a_missing_dev_shm_stops_a_job(machine):
    """DataLoader workers and NCCL would die at their start."""
    (found,) = memory.shared_memory(machine({}))
    assert found.stops
    assert "mount -t tmpfs" in found.cure


@given(value=st.floats(0, 1e12), failed=st.floats(0, 1e12), more=st.floats(0, 1e12))
def test_grades_never_get_better_with_less(value, failed, more):
    """The limits themselves are good; below the lower one it has failed."""
    degraded = failed + more
    status = grading.low(value, degraded=degraded, failed=failed)
    assert status is (Status.FAILED if value < failed else Status.DEGRADED if value < degraded else Status.OK)
    assert grading.high(-value, degraded=-degraded, failed=-failed) is status


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (64 * MIB, "64 MiB"), (1.5 * GIB, "1.5 GiB")]
)
def test_sizes_read_well(count, text):
    """With the unit that a person would use."""
    assert grading.size(count) == text
