"""The kernel's log, from a file in the form of /dev/kmsg."""

import os

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.host import kernel_log
from resilience_sdk.health.host.kernel_log import Record

FELL_OFF = "NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OOM = "Memory cgroup out of memory: Killed process 71 (python) total-vm:9kB, anon-rss:1kB"
HOUR_US = 3600 * 1_000_000


def log(machine, uptime_h, *records):
    """Return the root of a machine that has run for so many hours and logged `(at hour, message)`."""
    lines = "".join(f"4,{n},{int(at * HOUR_US)},-;{text}\n SUBSYSTEM=test\n" for n, (at, text) in enumerate(records))
    return machine({"/proc/uptime": f"{uptime_h * 3600.0} 1.0\n", "/dev/kmsg": lines})


def test_a_quiet_log_is_in_order(machine):
    """Most of what a kernel says means nothing to a job."""
    (found,) = kernel_log.kernel_log(log(machine, 2, (0, "Linux version 6.1"), (1, "eth0: link becomes ready")))
    assert (found.status, found.value) == (Status.OK, 0)
    assert found.evidence == "2 messages read"


def test_a_lost_gpu_fails_the_node_until_a_day_has_passed(machine):
    """By then it was reset, or its own probe still sees it."""
    (fresh,) = kernel_log.kernel_log(log(machine, 30, (10, FELL_OFF), (10, "detail"), (20, FELL_OFF)))
    assert (fresh.status, fresh.subject, fresh.value) == (Status.FAILED, "gpu_fell_off_bus", 2)
    assert "10 h ago" in fresh.evidence
    assert "drain" in fresh.cure
    (old,) = kernel_log.kernel_log(log(machine, 300, (10, FELL_OFF)))
    assert (old.status, old.cure) == (Status.OK, "")
    assert "12 days ago" in old.evidence


def test_only_what_is_newer_is_read_where_that_was_asked(machine):
    """A watch that has read the rest before pays for what came since."""
    root = log(machine, 30, (10, FELL_OFF), (29, "quiet"), (29.9, "quiet"))
    (new,) = kernel_log.kernel_log(root, 0.5 * 3600)
    assert (new.status, new.evidence) == (Status.OK, "1 messages read")
    (all_of_it,) = kernel_log.kernel_log(root, 21 * 3600)
    assert (all_of_it.status, all_of_it.subject) == (Status.FAILED, "gpu_fell_off_bus")


@pytest.mark.parametrize(("hours", "status"), [(0.5, Status.DEGRADED), (3, Status.OK)])
def test_what_a_job_did_to_itself_is_soon_forgotten(hours, status):
    """Its memory is free again."""
    (found,) = kernel_log.kernel_faults([Record(hours * 3600, OOM)])
    assert (found.subject, found.status) == ("host_oom_kill", status)


def test_a_fault_has_the_time_at_which_it_happened():
    """Not at which somebody looked, which may be a day later."""
    (found,) = kernel_log.kernel_faults([Record(900.0, OOM), Record(60.0, OOM)], 5000.0)
    assert found.data["at"] == 4940.0


def test_each_cause_is_told_once():
    """However often the kernel repeats it."""
    found = list(kernel_log.kernel_faults([Record(60.0, FELL_OFF)] * 50 + [Record(50.0, OOM)]))
    assert {finding.subject: finding.value for finding in found} == {"gpu_fell_off_bus": 50, "host_oom_kill": 1}


def test_a_log_that_may_not_be_read_says_how_to(machine):
    """As for most users on most machines."""
    (found,) = kernel_log.kernel_log(machine({}))
    assert found.status is Status.UNAVAILABLE
    assert "dmesg_restrict" in found.cure


def test_the_real_log_is_read_or_refused():
    """Reading it never waits for the next message."""
    found = list(kernel_log.kernel_log("/"))
    assert found
    readable = os.access("/dev/kmsg", os.R_OK)
    assert readable or found[0].status is Status.UNAVAILABLE
