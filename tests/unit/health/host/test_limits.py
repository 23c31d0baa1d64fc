"""Limits of processes, from files in the kernel's form."""

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.host import limits

LIMITS = """Limit                     Soft Limit           Hard Limit           Units     
Max processes             {processes:<20} {processes:<20} processes 
Max open files            {soft:<20} {hard:<20} files     
Max locked memory         {locked:<20} {locked:<20} bytes     
"""  # noqa: W291 - as the kernel writes it


def kernel_limits(soft="65536", hard="1048576", processes="unlimited", locked="unlimited"):
    """Return /proc/self/limits."""
    return {"/proc/self/limits": LIMITS.format(soft=soft, hard=hard, processes=processes, locked=locked)}


@pytest.mark.parametrize(
    ("soft", "hard", "status", "cure"),
    [
        ("64", "4096", Status.FAILED, "ulimit -n 4096"),
        ("1000", "4096", Status.DEGRADED, "ulimit -n 4096"),
        ("64", "64", Status.FAILED, "--ulimit nofile="),
        ("1024", "4096", Status.OK, ""),
        ("unlimited", "unlimited", Status.OK, ""),
    ],
)
def test_few_open_files_are_cured_where_that_can_be_done(machine, soft, hard, status, cure):
    """By the job itself up to the hard limit, by an administrator beyond it."""
    (found,) = limits.open_files(machine(kernel_limits(soft, hard)), world_size=8)
    assert found.status is status
    assert cure in found.cure
    assert bool(found.cure) is (status is not Status.OK)
    assert found.stops is (status is Status.FAILED)


def test_a_large_job_needs_more_files(machine):
    """Rank 0 holds a connection for each rank."""
    root = machine(kernel_limits("4096"))
    (small,) = limits.open_files(root, world_size=64)
    (large,) = limits.open_files(root, world_size=4096)
    assert (small.status, large.status) == (Status.OK, Status.DEGRADED)


def test_the_table_of_the_machine(machine):
    """Nine tenths of it are much."""
    (calm,) = limits.file_table(machine({"/proc/sys/fs/file-nr": "2432\t0\t100000\n"}))
    (full,) = limits.file_table(machine({"/proc/sys/fs/file-nr": "99000\t0\t100000\n"}))
    assert (calm.status, full.status) == (Status.OK, Status.DEGRADED)
    assert list(limits.file_table(machine({"/proc/sys/fs/file-nr": "junk"}))) == []


@pytest.mark.parametrize(
    ("most", "current", "status"), [("max", 5, Status.OK), (100, 60, Status.FAILED), (1000, 900, Status.DEGRADED)]
)
def test_the_control_group_counts_processes(machine, most, current, status):
    """Threads count, so a rank needs some hundred."""
    root = machine(
        kernel_limits(processes="96365")
        | {"/proc/self/cgroup": "0::/job\n", "/sys/fs/cgroup/job/pids.max": most}
        | {"/sys/fs/cgroup/job/pids.current": current}
    )
    (found,) = limits.processes(root, local_ranks=1)
    assert found.status is status
    assert found.value == (96365 if most == "max" else most - current)


def test_locked_memory_matters_only_to_rdma(machine):
    """And not to a process that may lock what it likes."""
    assert list(limits.locked_memory(machine(kernel_limits(locked="65536")))) == []
    rdma = {"/sys/class/infiniband/mlx5_0/node_type": "1: CA"}
    (found,) = limits.locked_memory(machine(kernel_limits(locked="65536") | rdma))
    assert found.status is Status.FAILED
    assert "ulimit -l unlimited" in found.cure
    root = machine({"/proc/self/status": "Name:\tpython\nCapEff:\t000001ffffffffff\n"})
    (capable,) = limits.locked_memory(root)
    assert capable.status is Status.OK


def test_this_process(machine):
    """The real files are in the form that is read."""
    (found,) = limits.open_files("/", world_size=1)
    assert found.value == "unlimited" or isinstance(found.value, int)
    (found,) = limits.processes("/", local_ranks=1)
    assert found.status in (Status.OK, Status.DEGRADED)
