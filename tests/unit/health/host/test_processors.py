"""Processors, load and stalls, from files in the kernel's form."""

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.host import clocks, processors


@pytest.mark.parametrize(("text", "count"), [("0-3", 4), ("0-1,4,6-7", 5), ("5", 1), ("", 0), ("a-b", 0), ("1-", 0)])
def test_kernel_lists_are_counted(text, count):
    """As /sys and /proc write sets of processors."""
    assert processors.count_list(text) == count


@pytest.mark.parametrize(("load", "status"), [("4.00", Status.OK), ("40.0", Status.DEGRADED)])
def test_load_is_for_each_processor(machine, load, status):
    """Somebody else computes here."""
    (found,) = processors.load(
        machine({"/proc/loadavg": f"{load} 1.0 1.0 3/400 12\n", "/sys/devices/system/cpu/online": "0-7\n"})
    )
    assert (found.status, found.value) == (status, float(load) / 8)


def test_a_quota_counts_like_missing_processors(machine):
    """A container sees all processors and may use the time of a few."""
    files = {"/proc/self/status": "Cpus_allowed_list:\t0-63\n", "/proc/self/cgroup": "0::/\n"}
    (free,) = processors.processors(machine(files | {"/sys/fs/cgroup/cpu.max": "max 100000"}), local_ranks=8)
    (tight,) = processors.processors(machine(files | {"/sys/fs/cgroup/cpu.max": "200000 100000"}), local_ranks=8)
    assert (free.status, free.value) == (Status.OK, 64)
    assert (tight.status, tight.value) == (Status.DEGRADED, 2)
    assert "--cpus" in tight.cure


def test_a_quota_of_version_1(machine):
    """-1 is no limit."""
    files = {"/proc/self/status": "Cpus_allowed_list:\t0-3\n", "/proc/self/cgroup": "1:cpu,cpuacct:/\n"}
    period = {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000}
    root = machine(files | period | {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1})
    assert next(processors.processors(root, 1)).value == 4
    root = machine({"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 50000})
    assert next(processors.processors(root, 1)).value == 0.5


def test_stalls_name_what_was_waited_for(machine):
    """The kernel's own measure, where it keeps one."""
    calm = "some avg10=9.00 avg60=9.00 avg300=9.00 total=1\nfull avg10=0.00 avg60=0.50 avg300=0.00 total=1\n"
    root = machine({"/proc/pressure/memory": calm, "/proc/pressure/io": calm.replace("avg60=0.50", "avg60=80.00")})
    found = {finding.subject: finding for finding in processors.stalls(root)}
    assert (found["memory"].status, found["io"].status) == (Status.OK, Status.DEGRADED)
    assert list(processors.stalls(machine({}) + "/elsewhere")) == []


@pytest.mark.parametrize(("answer", "status"), [(0, Status.OK), (5, Status.DEGRADED), (None, Status.UNAVAILABLE)])
def test_a_clock_that_nobody_keeps_right(answer, status):
    """Five is what adjtimex(2) says then."""
    (found,) = clocks.clock(answer)
    assert found.status is status
    assert bool(found.cure) is (status is Status.DEGRADED)


def test_the_real_clock_answers():
    """With one of the states of adjtimex(2)."""
    assert clocks.synchronised() in (*range(6), None)


@pytest.mark.parametrize(
    ("source", "status"), [("tsc", Status.OK), ("kvm-clock", Status.OK), ("hpet", Status.DEGRADED)]
)
def test_a_slow_clock(machine, source, status):
    """Every beat reads it."""
    place = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    (found,) = clocks.clock_source(machine({place: source + "\n"}))
    assert (found.status, found.value) == (status, source)
