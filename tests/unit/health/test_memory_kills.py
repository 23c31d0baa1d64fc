"""Kills for memory in the kernel's log: who was killed, and whether it was the job's."""

import pytest

from resilience_sdk.health import host
from resilience_sdk.health.findings import Status, to_event
from resilience_sdk.health.host import KernelMessage, Process
from resilience_sdk.health.memory_kills import MemoryKill, for_job, read_kills
from resilience_sdk.health.watch import HealthWatch, JobProcesses

# As Linux 6.18 writes them; who has asked for the memory is not who is killed.
OF_A_GROUP = (
    "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/jobs,task_memcg=/jobs/a,"
    "task=python,pid={pid},uid=0",
    "Memory cgroup out of memory: Killed process {pid} (python) total-vm:1251300kB, anon-rss:303008kB, UID:0",
    "oom_reaper: reaped process {pid} (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
)
OF_THE_NODE = (
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/system/db,"
    "task=postgres: wal, writer,pid={pid},uid=26",
    "Out of memory: Killed process {pid} (postgres: wal, writer) total-vm:9kB, anon-rss:1kB, UID:26",
)
OLD = (
    "Out of memory: Kill process 9 (python) score 900 or sacrifice child",
    "Killed process {pid} (python), UID 7, total",
)
NOW = 5000.0


def killed(lines, pid, age_s=50.0):
    """Return the records of one kill."""
    return [KernelMessage(age_s - at / 1000, line.format(pid=pid)) for at, line in enumerate(lines)]


def finding(*records):
    """Return what a doctor says of it."""
    (found,) = host.kernel_faults([record for kill in records for record in kill], NOW)
    return found


def told(found, processes, *groups):
    """Return what each finding for a job says: its subject, its cause, and how bad it is."""
    return [(one.subject, one.data.get("cause"), one.status.value) for one in for_job(found, processes, groups)]


OURS = ("host_oom_kill", "host_oom_kill", "degraded")
OTHERS = ("memory kill", None, "degraded")
NONE = ("", None, "ok")


@pytest.mark.parametrize(
    ("lines", "kill"),
    [
        (OF_A_GROUP, MemoryKill(pid=71, at=10.001, name="python", control_group="/jobs/a", at_limit=True)),
        (OF_THE_NODE, MemoryKill(pid=71, at=10.0, name="postgres: wal, writer", control_group="/system/db")),
        (OLD, MemoryKill(pid=71, at=10.001, name="python")),
        (OF_A_GROUP[:1], None),
    ],
)
def test_a_kill_is_read_once_from_all_its_lines(lines, kill):
    """With the group that the process was in; whoever asked for the memory is nobody who was killed."""
    assert read_kills((10 + at / 1000, line.format(pid=71)) for at, line in enumerate(lines)) == [kill] * bool(kill)


def test_a_process_id_that_comes_back_is_another_kill():
    """Hours later the number is another process's."""
    lines = [(at, OF_THE_NODE[1].format(pid=71)) for at in (10.0, 11.0, 4000.0)]
    assert [kill.at for kill in read_kills(lines)] == [10.0, 4000.0]


def test_where_no_job_is_known_a_kill_is_the_nodes():
    """The doctor names no cause of a job: when it was, who was killed, and what was short."""
    group, node = finding(killed(OF_A_GROUP, 71)), finding(killed(OF_THE_NODE, 72))
    assert (group.subject, group.status, group.value, group.data["at"]) == ("memory kill", Status.DEGRADED, 1, 4950.001)
    assert "python (pid 71); its control group was at its limit" in group.evidence
    assert "postgres: wal, writer (pid 72); the node was short of memory" in node.evidence
    assert to_event(node).items() >= {"what": "kernel log memory kill", "cause": None}.items()
    assert finding(killed(OF_THE_NODE, 72, age_s=3 * 3600.0)).status is Status.OK


def test_a_kill_is_of_the_job_only_where_the_process_was():
    """One of somebody else is a note on the node that was short of memory, and of a foreign group's limit nothing."""
    ours, node, group = (killed(lines, pid) for lines, pid in ((OF_A_GROUP, 71), (OF_THE_NODE, 72), (OF_A_GROUP, 73)))
    processes = {71: True, 72: False, 73: False}
    assert told(finding(ours), processes) == [OURS]
    assert told(finding(node), processes) == [OTHERS]
    assert told(finding(group), processes) == [NONE]
    assert told(finding(group, ours, node), processes) == [OURS, OTHERS]
    of_job, note = for_job(finding(ours, node), processes, ())
    assert "of this job" in of_job.evidence
    assert "python (pid 71)" in of_job.evidence
    assert "DataLoader" in of_job.cure
    assert "of somebody else" in note.evidence
    assert note.evidence.endswith("the node is short of memory")
    assert note.cure == ""


def test_the_group_tells_of_a_process_that_nobody_has_seen():
    """A worker that lived between two looks, or one in a container, whose numbers are others in the kernel's log."""
    found = finding(killed(OF_A_GROUP, 71))
    assert told(found, {}, "/jobs") == told(found, {}, "/jobs/a") == [OURS]
    assert told(found, {}, "/job", "/jobs/b") == [NONE]
    assert told(found, {71: False}, "/jobs") == [NONE]  # seen, and somebody else's in the same group
    assert told(found, {}, "/", "") == [NONE]  # everybody's


def test_what_is_no_kill_stays_as_it_is():
    """A fault of hardware is the node's, whoever met it."""
    lost = finding([KernelMessage(60.0, "NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.")])
    assert for_job(lost, {}, ()) == [lost]


def process(pid, parent, start=0):
    """Return a line of the process table."""
    return Process(pid=pid, name="python", state="S", parent=parent, start=start, uid=0)


def test_processes_of_the_job_are_known_until_the_look_after_their_end():
    """Children of the launcher and theirs, an orphan of them too; a number that was used again is another process."""
    known = JobProcesses(10)
    known.update([process(10, 1), process(11, 10), process(12, 11), process(20, 1)])
    assert known.known() == {10: True, 11: True, 12: True, 20: False}
    known.update([process(10, 1), process(12, 1), process(13, 12)])  # 11 was killed: its child is an orphan
    assert known.known() == {10: True, 11: True, 12: True, 13: True, 20: False}
    known.update([process(10, 1), process(12, 1, start=5)])
    known.update([process(10, 1), process(12, 1, start=5)])
    assert known.known() == {10: True, 12: False}


def test_kills_that_were_counted_before_the_job_are_none_of_it(machine):
    """The counter of a control group is older than the job; one more is news."""

    def count(kills):
        files = {"/proc/self/cgroup": "0::/job\n", "/sys/fs/cgroup/job/memory.events": f"oom_kill {kills}\n"}
        return host.oom_kills(machine(files))

    watch = HealthWatch.resumed([], kills_before=2)
    assert not watch.take([count(2)], 0.0)
    (news,) = watch.take([count(3)], 60.0)
    assert news.value == 3
    again = HealthWatch.resumed([{"t": 1.0, **to_event(news)}], kills_before=2)
    assert not again.take([count(3)], 0.0)
