"""The probes of the machine, from files in the kernel's form of machines that are not this one, and from this one."""

import os
import signal
import subprocess
import sys
import time

import needed
import pytest

from resilience_sdk.core.words import GIB, MIB
from resilience_sdk.health import host
from resilience_sdk.health.findings import Status
from resilience_sdk.health.host import KernelMessage, Process
from resilience_sdk.health.probes import Context

MEMINFO = "MemTotal:       {total} kB\nMemFree:        1 kB\nMemAvailable:   {available} kB\n"
V2, V1 = "/sys/fs/cgroup/", "/sys/fs/cgroup/memory/"
ROOT_V2, ROOT_V1 = "0::/\n", "4:memory:/\n"


def v2(group, most, used=0, cache=""):
    """Return the memory of a control group."""
    files = {"max": most, "current": used, "stat": cache.format(GIB, 4 * GIB, 5 * GIB)}
    return {f"{V2}{group}memory.{name}": text for name, text in files.items()}


def v1(group, most, used=0, cache=""):
    """Return the same, of the first version of the kernel's interface."""
    files = {"limit_in_bytes": most, "usage_in_bytes": used, "stat": cache.format(GIB, 4 * GIB, 5 * GIB)}
    return {f"{V1}{group}memory.{name}": text for name, text in files.items()}


def with_memory(machine, cgroup, files):
    """Return the root of a machine with 64 GiB, of which 60 are free, and these control groups."""
    meminfo = MEMINFO.format(total=64 * 2**20, available=60 * 2**20)
    return machine({"/proc/meminfo": meminfo, "/proc/self/cgroup": cgroup} | files)


@pytest.mark.parametrize(
    ("cgroup", "files", "gib", "limited_by"),
    [
        ("", {}, 60, "the machine's memory"),
        ("0::/job/step\n", v2("job/step/", "max") | v2("job/", 2 * GIB, GIB), 1, "cgroup/job"),
        ("4:memory:/job\n0::/\n", v1("job/", 2 * GIB, GIB), 1, "memory/job"),
        # Others fill the parent; our own group has a smaller limit, and more left of it.
        ("0::/pod/ours\n", v2("pod/", 32 * GIB, 31 * GIB) | v2("pod/ours/", 8 * GIB, 2 * GIB), 1, "cgroup/pod"),
        # A group that is full of cached files has memory left; a training reads its data again and again.
        (ROOT_V2, v2("", 8 * GIB, 8 * GIB, "anon 1\ninactive_file {1}\n"), 4, "cgroup"),
        (ROOT_V2, v2("", 8 * GIB, 8 * GIB, "inactive_file {0}\nactive_file {2}\n"), 6, "cgroup"),
        (
            ROOT_V1,
            v1("", 8 * GIB, 8 * GIB, "active_file 1\ntotal_inactive_file {0}\ntotal_active_file {2}\n"),
            6,
            "memory",
        ),
        (ROOT_V1, v1("", 9223372036854771712), 60, "the machine's memory"),  # what stands where nothing is limited
    ],
)
def test_what_limits_the_memory_is_told(machine, cgroup, files, gib, limited_by):
    """Plenty of memory in the machine does not help a container that has used its own."""
    found = host.memory(with_memory(machine, cgroup, files))
    assert (found.value, found.stops) == (gib * GIB, False)
    assert found.evidence.endswith(limited_by)


def test_too_little_memory_stops_a_job(machine):
    """With its cure; a platform that does not tell stops nothing."""
    found = host.memory(with_memory(machine, ROOT_V2, v2("", 2 * GIB, 2 * GIB - 100 * MIB)))
    assert (found.value, found.stops) == (100 * MIB, True)
    assert "--mem" in found.cure
    missing = host.memory(machine({}) + "/elsewhere")
    assert (missing.status, missing.stops) == (Status.UNAVAILABLE, False)


def test_a_kill_in_our_group_counts_and_one_elsewhere_does_not(machine):
    """Other jobs on a shared node are no reason to distrust it."""
    files = {"/proc/self/cgroup": "0::/job\n", "/proc/vmstat": "oom_kill 8\n"}
    elsewhere = host.oom_kills(machine(files))
    calm = host.oom_kills(machine({f"{V2}job/memory.events": "low 0\noom 0\noom_kill 0\n"}))
    killed = host.oom_kills(machine({f"{V2}job/memory.events": "low 0\noom 3\noom_kill 2\n"}))
    assert (elsewhere.status, elsewhere.value, "growth" in elsewhere.data) == (Status.OK, 8, False)
    assert (calm.status, calm.data["control_group"], calm.data["machine"]) == (Status.OK, 0, 8)
    assert (killed.status, killed.value, killed.data["growth"]["per_minute"]) == (Status.DEGRADED, 2, 0)
    assert "fewer DataLoader workers" in killed.cure


def test_a_missing_dev_shm_stops_a_job(machine):
    """DataLoader workers and NCCL would die at their start; the real one is measured."""
    found = host.shared_memory(machine({}))
    assert found.stops
    assert "mount -t tmpfs" in found.cure
    info = os.statvfs("/dev/shm")
    assert host.shared_memory().data["total"] == info.f_blocks * info.f_frsize


LIMITS = """Limit                     Soft Limit           Hard Limit           Units     
Max processes             {processes:<20} {processes:<20} processes 
Max open files            {soft:<20} {hard:<20} files     
Max locked memory         {locked:<20} {locked:<20} bytes     
"""  # noqa: W291 - as the kernel writes it


def kernel_limits(soft="65536", hard="1048576", processes="unlimited", locked="unlimited"):
    """Return /proc/self/limits."""
    return {"/proc/self/limits": LIMITS.format(soft=soft, hard=hard, processes=processes, locked=locked)}


def left_to_start(most, started=0):
    """Return the limit of processes of a control group."""
    return kernel_limits() | {
        "/proc/self/cgroup": "0::/job\n",
        f"{V2}job/pids.max": most,
        f"{V2}job/pids.current": started,
    }


LOCKED, IB = kernel_limits(locked="65536"), {"/sys/class/infiniband/mlx5_0/node_type": "1: CA"}
MAY_LOCK = {"/proc/self/status": "CapEff:\t000001ffffffffff\n"}
CPUS = {"/proc/self/status": "Cpus_allowed_list:\t0-63\n"}
CPUS_V2 = {**CPUS, "/proc/self/cgroup": ROOT_V2}
CPUS_V1 = {**CPUS, "/proc/self/cgroup": "1:cpu,cpuacct:/\n", f"{V2}cpu,cpuacct/cpu.cfs_period_us": 100000}
QUOTA_V1 = f"{V2}cpu,cpuacct/cpu.cfs_quota_us"
ONLINE = {"/sys/devices/system/cpu/online": "0-7\n"}
CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
FILE_TABLE = "/proc/sys/fs/file-nr"


@pytest.mark.parametrize(
    ("check", "files", "status", "value", "cure"),
    [
        # Few open files are cured by the job itself up to the hard limit, by an administrator beyond it.
        ("open_files", kernel_limits("64", "4096"), "failed", 64, "ulimit -n 4096"),
        ("open_files", kernel_limits("1000", "4096"), "degraded", 1000, "ulimit -n 4096"),
        ("open_files", kernel_limits("64", "64"), "failed", 64, "--ulimit nofile="),
        ("open_files", kernel_limits("1024", "4096"), "ok", 1024, ""),
        ("open_files", kernel_limits("unlimited", "unlimited"), "ok", "unlimited", ""),
        ("file_table", {FILE_TABLE: "2432\t0\t100000\n"}, "ok", 2432, ""),
        ("file_table", {FILE_TABLE: "99000\t0\t100000\n"}, "degraded", 99000, "lsof"),
        ("file_table", {FILE_TABLE: "junk"}, None, None, ""),
        # Threads count, so a rank needs some hundred.
        ("processes", left_to_start("max") | kernel_limits(processes="96365"), "ok", 96365, ""),
        ("processes", left_to_start(1000, 960), "failed", 40, "--pids-limit"),
        ("processes", left_to_start(10_000, 9100), "degraded", 900, "--pids-limit"),
        # Locked memory matters only to RDMA, and not to a process that may lock what it likes.
        ("locked_memory", LOCKED, None, None, ""),
        ("locked_memory", LOCKED | IB, "failed", 65536, "ulimit -l unlimited"),
        ("locked_memory", LOCKED | IB | MAY_LOCK, "ok", 65536, ""),
        # A container sees all processors and may use the time of a few.
        ("processors", {**CPUS_V2, f"{V2}cpu.max": "max 100000"}, "ok", 64, ""),
        ("processors", {**CPUS_V2, f"{V2}cpu.max": "200000 100000"}, "degraded", 2, "--cpus"),
        ("processors", {**CPUS_V1, QUOTA_V1: -1}, "ok", 64, ""),
        ("processors", {**CPUS_V1, QUOTA_V1: 50000}, "degraded", 0.5, "--cpus"),
        ("load", {"/proc/loadavg": "4.00 1.0 1.0 3/400 12\n", **ONLINE}, "ok", 0.5, ""),
        ("load", {"/proc/loadavg": "40.0 1.0 1.0 3/400 12\n", **ONLINE}, "degraded", 5, "top"),
        # Every beat reads the clock.
        ("clock_source", {CLOCK: "tsc\n"}, "ok", "tsc", ""),
        ("clock_source", {CLOCK: "hpet\n"}, "degraded", "hpet", "tsc=reliable"),
    ],
)
def test_what_the_kernels_files_say(machine, check, files, status, value, cure):
    """Of a machine with four ranks; only what must be good stops a job."""
    looked = host.host(Context(root=machine(files), local_ranks=4))
    (found,) = [finding for finding in looked if finding.check == check] or [None]
    assert (found and found.status) == status
    if found:
        assert (found.value, bool(found.cure)) == (value, status != "ok")
        assert found.stops is (status == "failed" and check in ("open_files", "processes"))
        assert cure in found.cure


def test_a_large_job_needs_more_files(machine):
    """Rank 0 holds a connection for each rank."""
    root = machine(kernel_limits("4096"))
    assert [host.open_files(root, ranks).status for ranks in (64, 4096)] == [Status.OK, Status.DEGRADED]


@pytest.mark.parametrize(("text", "count"), [("0-3", 4), ("0-1,4,6-7", 5), ("5", 1), ("", 0), ("a-b", 0), ("1-", 0)])
def test_kernel_lists_are_counted(text, count):
    """As /sys and /proc write sets of processors."""
    assert host.count_list(text) == count


def test_stalls_name_what_was_waited_for(machine):
    """The kernel's own measure, where it keeps one."""
    calm = "some avg10=9.00 avg60=9.00 avg300=9.00 total=1\nfull avg10=0.00 avg60=0.50 avg300=0.00 total=1\n"
    root = machine({"/proc/pressure/memory": calm, "/proc/pressure/io": calm.replace("avg60=0.50", "avg60=80.00")})
    found = {finding.subject: finding for finding in host.stalls(root)}
    assert (found["memory"].status, found["io"].status) == (Status.OK, Status.DEGRADED)
    assert "iotop" in found["io"].cure
    assert list(host.stalls(root + "/elsewhere")) == []


def test_this_machine():
    """The real files are in the form that is read, and every check of the table has its finding."""
    found = {finding.check: finding for finding in host.host(Context())}
    assert {"memory_available", "shared_memory", "open_files", "processes", "processors", "load"} <= set(found)
    assert found["open_files"].value == "unlimited" or isinstance(found["open_files"].value, int)
    assert host.synchronised() in (*range(6), None)
    clocks = [host.clock(answer).status for answer in (0, 5, None)]  # five: nobody keeps it right
    assert clocks == [Status.OK, Status.DEGRADED, Status.UNAVAILABLE]
    (own,) = [entry for entry in host.process_table("/") if entry.pid == os.getpid()]
    assert (own.parent, own.uid) == (os.getppid(), os.getuid())


FELL_OFF = "NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OOM = "Memory cgroup out of memory: Killed process 71 (python) total-vm:9kB, anon-rss:1kB"
HOUR_US = 3600 * 1_000_000


def kernel_log(machine, uptime_h, *records, newer_h=None):
    """Return what is said of a machine that has run for so many hours and logged `(at hour, message)`."""
    lines = "".join(f"4,{n},{int(at * HOUR_US)},-;{text}\n SUBSYSTEM=test\n" for n, (at, text) in enumerate(records))
    root = machine({"/proc/uptime": f"{uptime_h * 3600.0} 1.0\n", "/dev/kmsg": lines})
    return list(host.kernel(Context(root=root, log_newer_s=None if newer_h is None else newer_h * 3600)))


def test_a_lost_gpu_fails_the_node_until_a_day_has_passed(machine):
    """By then it was reset, or its own probe still sees it; most of what a kernel says means nothing to a job."""
    (quiet,) = kernel_log(machine, 2, (0, "Linux version 6.1"), (1, "eth0: link becomes ready"))
    assert (quiet.status, quiet.value, quiet.evidence) == (Status.OK, 0, "2 messages read")
    (fresh,) = kernel_log(machine, 30, (10, FELL_OFF), (10, "detail"), (20, FELL_OFF))
    assert (fresh.status, fresh.subject, fresh.value) == (Status.FAILED, "gpu_fell_off_bus", 2)
    assert "10 h ago" in fresh.evidence
    assert "drain" in fresh.cure
    (old,) = kernel_log(machine, 300, (10, FELL_OFF))
    assert (old.status, old.cure) == (Status.OK, "")
    assert "12 days ago" in old.evidence


def test_only_what_is_newer_is_read_where_that_was_asked(machine):
    """A watch that has read the rest before pays for what came since."""
    records = (10, FELL_OFF), (29, "quiet"), (29.9, "quiet")
    (new,) = kernel_log(machine, 30, *records, newer_h=0.5)
    assert (new.status, new.evidence) == (Status.OK, "1 messages read")
    (all_of_it,) = kernel_log(machine, 30, *records, newer_h=21)
    assert (all_of_it.status, all_of_it.subject) == (Status.FAILED, "gpu_fell_off_bus")


def test_each_cause_is_told_once_with_the_time_at_which_it_happened():
    """However often the kernel repeats it. A kill for memory is soon forgotten: the memory is free again."""
    log = [KernelMessage(60.0, FELL_OFF)] * 50 + [KernelMessage(900.0, OOM), KernelMessage(50.0, OOM)]
    lost, killed = host.kernel_faults(log, 5000.0)
    assert (lost.subject, lost.value) == ("gpu_fell_off_bus", 50)
    assert (killed.subject, killed.value, killed.data["at"]) == ("memory kill", 2, 4950.0)
    (forgotten,) = host.kernel_faults([KernelMessage(3 * 3600.0, OOM)])
    assert (killed.status, forgotten.status) == (Status.DEGRADED, Status.OK)


def test_a_log_that_may_not_be_read_says_how_to(machine):
    """As for most users on most machines; reading the real one never waits for the next message."""
    (found,) = host.kernel(Context(root=machine({})))
    assert found.status is Status.UNAVAILABLE
    assert "dmesg_restrict" in found.cure
    real = list(host.kernel(Context()))
    assert os.access("/dev/kmsg", os.R_OK) or real[0].status is Status.UNAVAILABLE


def process(pid, state="S", parent=1, start=0, uid=1000, name="python"):
    """Return a line of a process table."""
    return Process(pid=pid, name=name, state=state, parent=parent, start=start, uid=uid)


def left_behind(root="/"):
    """Return what earlier jobs left, by check."""
    return {finding.check: finding for finding in host.processes(Context(root=root))}


def test_waiting_for_a_disk_for_a_moment_is_not_stuck():
    """Only what is in D state in both looks, and is the same process; it is named with its place in the kernel."""
    first = [process(1, "D"), process(2, "D", start=5), process(3, "S"), process(4, "D")]
    second = [process(1, "R"), process(2, "D", start=6), process(3, "D"), process(4, "D")]
    (stuck,) = host.stuck(first, second)
    found = host.stuck_finding([stuck], {4: "nfs_wait_bit_killable"})
    assert found.status is Status.DEGRADED
    assert "4 (python in nfs_wait_bit_killable)" in found.evidence
    assert host.stuck_finding([], {}).status is Status.OK


def test_many_zombies_are_their_parents_fault():
    """A few are normal."""
    few, many = (host.zombies([process(n, "Z", parent=7) for n in range(count)]) for count in (3, 200))
    assert (few.status, many.status, many.value) == (Status.OK, Status.DEGRADED, 200)
    assert "end process 7" in many.cure


RANK_3, RUN = {"RANK": "3"}, {"TORCHELASTIC_RUN_ID": "abc"}


@pytest.mark.parametrize(
    ("variables", "uid", "is_left"),
    [
        (RANK_3 | RUN, 1000, True),
        (RANK_3 | {"RESILIENCE_INTERNAL_JOB": "slurm-7.0"}, 1000, True),
        (RUN, 1000, False),
        (RANK_3, 1000, False),
        (RANK_3 | RUN, 1001, False),
    ],
)
def test_a_rank_whose_parent_is_init_has_lost_its_launcher(variables, uid, is_left):
    """Only our own, and only what a launcher marked as a rank."""
    found = host.orphans([process(9)], uid, {9: variables})
    assert (found.status is Status.DEGRADED) is ("kill 9" in found.cure) is is_left


@pytest.mark.parametrize(
    ("first", "left"),
    [("/sbin/init", [9]), ("/usr/bin/tini\0--\0python\0t.py", [9]), ("/opt/bin/python3.11\0torchrun", [])],
)
def test_in_a_container_whose_launcher_is_process_1_its_ranks_are_no_leftovers(machine, monkeypatch, first, left):
    """Nobody must be told to kill the job that runs."""
    monkeypatch.setattr(host, "_PAUSE_S", 0.0)
    files = {"/proc/1/cmdline": first}
    for pid, parent in ((1, 0), (9, 1)):
        files[f"/proc/{pid}/stat"] = f"{pid} (python) S {parent} " + " ".join(["7"] * 30)
        files[f"/proc/{pid}/environ"] = "RANK=0\0TORCHELASTIC_RUN_ID=abc"
    assert left_behind(machine(files))["leftover_ranks"].data["pids"] == left


@pytest.fixture
def orphan():
    """Yield the pid of a sleeping process with a rank's variables, whose parent is gone."""
    sleep = f"{sys.executable} -S -c 'import time; time.sleep(100)' >&2 & echo $!"
    env = {**os.environ, "RANK": "1", "TORCHELASTIC_RUN_ID": "left-behind"}
    done = subprocess.run(["sh", "-c", sleep], env=env, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    pid = int(done.stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)


def test_a_real_orphan_is_found(orphan):
    """Where it becomes a child of init, and not of a subreaper."""
    parent = next(entry.parent for entry in host.process_table("/") if entry.pid == orphan)
    if parent != 1:
        pytest.skip(f"orphans become children of {parent} here")
    with open("/proc/1/cmdline") as file:
        if "python" in file.read():
            pytest.skip("process 1 may be a launcher here")
    found = left_behind()["leftover_ranks"]
    assert orphan in found.data["pids"]
    assert f"{orphan} (python" in found.evidence
    assert "rank 1 of job left-behind" in found.evidence


def test_a_real_process_in_d_state_is_found(tmp_path):
    """The parent of a vfork waits for its child in the kernel, as for a dead mount."""
    source = tmp_path / "stuck.c"
    source.write_text("#include <unistd.h>\nint main(void) { if (vfork() == 0) { pause(); _exit(0); } return 0; }\n")
    subprocess.run(
        [needed.program("gcc", "gcc libc6-dev"), "-w", "-o", str(tmp_path / "stuck"), str(source)],
        check=True,
        timeout=60,
    )
    stuck = subprocess.Popen([str(tmp_path / "stuck")], start_new_session=True)
    try:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            found = left_behind()["stuck_processes"]
            if stuck.pid in found.data["pids"]:
                break
        assert stuck.pid in found.data["pids"]
        assert found.status is Status.DEGRADED
    finally:
        os.killpg(stuck.pid, signal.SIGKILL)
        stuck.wait(10)
