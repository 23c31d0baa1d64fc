"""The probes of the machine: memory, limits, processors, clocks; what the kernel said, and what earlier jobs left.

All is read from the kernel's files below a root, so that a test can show any machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from resilience_sdk.core.environ import INTERNAL_JOB
from resilience_sdk.core.words import GIB, MIB, size
from resilience_sdk.health.findings import Finding, Status, high, listed, low, severity
from resilience_sdk.health.probes import HOST, KERNEL, PROCESSES, Context
from resilience_sdk.system import procfs


def host(context: Context) -> Iterator[Finding]:
    """Yield memory, limits, processors and clock: what the kernel keeps in its own tables."""
    root = context.root
    yield memory(root)
    yield oom_kills(root)
    yield shared_memory(root)
    yield open_files(root, context.world_size)
    yield from file_table(root)
    yield process_limits(root, context.local_ranks)
    yield from locked_memory(root)
    yield processors(root, context.local_ranks)
    yield load(root)
    yield from stalls(root)
    yield from clock_source(root)
    yield clock(synchronised())


def _read(root: str, path: str) -> str:
    return procfs.text(procfs.below(root, path)) or ""


MIN_MEMORY = 256 * MIB  # one process that imports torch takes about 220 MB
LOW_MEMORY = GIB
LOW_SHARE = 0.1


def memory(root: str = "/") -> Finding:
    """Return how much memory this process and its children may still take."""
    left = procfs.memory_left(root)
    if left is None:
        return HOST.found("memory_available", Status.UNAVAILABLE, "/proc/meminfo cannot be read")
    limited_by = "the machine's memory" if left.group is None else f"the control group {left.group}"
    limit = max(LOW_MEMORY, round(LOW_SHARE * left.total))
    evidence = f"{size(left.free)} of {size(left.total)} available, limited by {limited_by}"
    status = low(left.free, degraded=limit, failed=MIN_MEMORY)
    return HOST.found("memory_available", status, evidence, left.free, limit=limit)


def oom_kills(root: str = "/") -> Finding:
    """Return how often the kernel has killed for memory: in our control group, and on the whole machine."""
    ours = procfs.oom_kills(root)
    on_node = procfs.count(procfs.below(root, "/proc/vmstat"), "oom_kill")
    data = {"control_group": ours, "machine": on_node}
    if ours is not None:
        also = f"; {on_node} on the machine since it started" if on_node is not None else ""
        evidence = f"{ours} processes were killed for memory in this control group{also}"
        return HOST.found("oom_kills", high(ours, degraded=0), evidence, ours, data=data, limit=0)
    if on_node is None:
        evidence = "neither the control group nor /proc/vmstat counts them"
        return HOST.found("oom_kills", Status.UNAVAILABLE, evidence)
    # Those of others on the machine are no fault of ours.
    evidence = f"{on_node} processes were killed for memory on this machine since it started"
    return HOST.found("oom_kills", Status.OK, evidence, on_node, data=data, growth_per_minute=None)


# NVIDIA's documentation of NCCL asks for `--shm-size=1g` in containers; NCCL makes a segment of 9 MiB and more for
# each pair of ranks, DataLoader workers put whole batches there.
LOW_SHM, LOW_FREE_SHM = GIB, GIB // 8
MIN_SHM = 16 * MIB


def shared_memory(root: str = "/") -> Finding:
    """Return how large /dev/shm is, and how much of it is free."""
    place = "/dev/shm"  # noqa: S108 - looked at, nothing is made there
    try:
        info = os.statvfs(procfs.below(root, place))
    except OSError as error:
        cure = f"mount it: `mount -t tmpfs tmpfs {place}`; DataLoader workers and NCCL need it"
        evidence = f"cannot be used: {error.strerror}"
        return HOST.found("shared_memory", Status.FAILED, evidence, subject=place, cure=cure)
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    statuses = low(total, degraded=LOW_SHM, failed=MIN_SHM), low(free, degraded=LOW_FREE_SHM, failed=MIN_SHM)
    evidence, data = f"{size(free)} of {size(total)} free", {"total": total, "free": free}
    status = max(statuses, key=severity)
    if total < LOW_SHM:
        return HOST.found("shared_memory", status, evidence, total, subject=place, limit=LOW_SHM, data=data)
    cure = f"remove what earlier jobs left in it: `ls -la {place}`, `lsof {place}`"
    return HOST.found("shared_memory", status, evidence, free, subject=place, limit=LOW_FREE_SHM, cure=cure, data=data)


MIN_FILES = 256  # importing torch and one gloo group of a few ranks come near it
LOW_FILES = 1024
FILES_BESIDE = 512  # libraries, data files, checkpoints, DataLoader workers
FILES_PER_RANK = 8  # rank 0 holds a connection of the store for each rank, gloo one for each pair and group
MIN_PROCESSES = 64
PROCESSES_PER_RANK = 256  # threads count: OpenMP, NCCL, DataLoader workers
MAX_OF_FILE_TABLE = 0.9
_CAP_IPC_LOCK = 14
_LIMIT = re.compile(r"^(?P<name>.+?)\s{2,}(?P<soft>\S+)\s+(?P<hard>\S+)", re.MULTILINE)
_UNLIMITED = float("inf")


def open_files(root: str, world_size: int) -> Finding:
    """Return how many files a process may have open."""
    soft, hard = _limit(root, "Max open files")
    if soft is None:
        return HOST.found("open_files", Status.UNAVAILABLE, "/proc/self/limits")
    limit = max(LOW_FILES, FILES_BESIDE + FILES_PER_RANK * world_size)
    status = low(soft, degraded=limit, failed=MIN_FILES)
    evidence = f"`ulimit -n` is {_shown(soft)}, it may be raised to {_shown(hard)}"
    cure = HOST.checks["open_files"].cure
    if hard is not None and hard >= limit:
        cure = f"`ulimit -n {_shown(hard)}` in the job's script, before the launcher"
    return HOST.found("open_files", status, evidence, _shown(soft), limit=limit, cure=cure)


def file_table(root: str) -> Iterator[Finding]:
    """Yield how full the table of open files of the whole machine is."""
    words = _read(root, "/proc/sys/fs/file-nr").split()
    if len(words) == 3 and int(words[2]):
        used, most = int(words[0]), int(words[2])
        limit = round(MAX_OF_FILE_TABLE * most)
        evidence = f"{used} files are open on the machine, it can have {most}"
        yield HOST.found("file_table", high(used, degraded=MAX_OF_FILE_TABLE * most), evidence, used, limit=limit)


def process_limits(root: str, local_ranks: int) -> Finding:
    """Return how many processes and threads may still be started; the smaller of our limit and our control group's."""
    found: list[tuple[int, str]] = []
    for most, group in procfs.limits(root, "pids", "pids.max"):
        found.append((most - (procfs.number(group / "pids.current") or 0), f"pids.max of the control group {group}"))
    soft, _ = _limit(root, "Max processes")
    if soft is not None and soft != _UNLIMITED:
        # How many this user already has cannot be told from one container: the limit itself is what is known.
        found.append((int(soft), "`ulimit -u`"))
    limit = PROCESSES_PER_RANK * local_ranks
    if not found:
        return HOST.found("processes", Status.OK, "not limited", limit=limit)
    left, source = min(found)
    status = low(left, degraded=limit, failed=MIN_PROCESSES)
    return HOST.found("processes", status, f"{left} may be started, by {source}", left, limit=limit)


def locked_memory(root: str) -> Iterator[Finding]:
    """Yield whether the memory of RDMA transfers may be locked; nothing on a machine without such a device."""
    soft, _ = _limit(root, "Max locked memory")
    if soft is None or not procfs.entries(procfs.below(root, "/sys/class/infiniband")):
        return
    may = int(procfs.fields(procfs.below(root, "/proc/self/status"), ":").get("CapEff") or "0", 16)
    if soft == _UNLIMITED or may >> _CAP_IPC_LOCK & 1:
        yield HOST.found("locked_memory", Status.OK, "not limited", _shown(soft))
    else:
        evidence = f"`ulimit -l` is {size(soft)}, RDMA registers all that it transfers"
        yield HOST.found("locked_memory", low(soft, degraded=GIB, failed=64 * MIB), evidence, _shown(soft))


def _limit(root: str, name: str) -> tuple[float | None, float | None]:
    """Return the soft and hard limit of /proc/self/limits, infinite where there is none."""
    for match in _LIMIT.finditer(_read(root, "/proc/self/limits")):
        if match["name"] == name:
            return _value(match["soft"]), _value(match["hard"])
    return None, None


def _value(word: str) -> float | None:
    return _UNLIMITED if word == "unlimited" else int(word) if word.isdecimal() else None


def _shown(limit: float | None) -> int | str:
    return "unknown" if limit is None else "unlimited" if limit == _UNLIMITED else int(limit)


# Share of the last minute in which every task that was not idle waited (the kernel's PSI, `full avg60`).
MAX_STALLED_PERCENT = {"memory": 10.0, "io": 40.0}
_IO_CURE = "see who reads and writes (`iotop -o`), and `resilience doctor` on the storage server's other clients"


def processor_model(root: str = "/") -> str:
    """Return what the first processor calls itself, empty where it does not."""
    named = re.search(r"^model name\s*:\s*(.+)$", _read(root, "/proc/cpuinfo"), re.M)
    return named[1].strip() if named else ""


def processors(root: str, local_ranks: int) -> Finding:
    """Return how many processors the ranks of this node have."""
    allowed = procfs.fields(procfs.below(root, "/proc/self/status"), ":").get("Cpus_allowed_list", "")
    count: float = count_list(allowed)
    if not count:
        return HOST.found("processors", Status.UNAVAILABLE, "/proc/self/status")
    limited_by = f"the processors {allowed}"
    if (quota := _quota(root)) is not None and quota < count:
        count, limited_by = quota, "the quota of the control group"
    status = low(count, degraded=local_ranks)
    evidence = f"{count:g} for {local_ranks} ranks on this node, limited by {limited_by}"
    return HOST.found("processors", status, evidence, round(count, 2), limit=local_ranks)


def _quota(root: str) -> float | None:
    """Return how many processors' time the control groups allow, None where that is not limited."""
    found = []
    for group in procfs.groups(root, "cpu"):
        words = (procfs.text(group / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdecimal():
            found.append(int(words[0]) / int(words[1]))
        quota, period = (procfs.number(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)


def count_list(text: str) -> int:
    """Return how many processors a kernel list such as `0-3,8` names; 0 for anything else."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return 0
    parts = (part.partition("-") for part in text.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in parts)


def load(root: str) -> Finding:
    """Return how many tasks there are for each processor of the machine."""
    words = _read(root, "/proc/loadavg").split()
    cpus = count_list(_read(root, "/sys/devices/system/cpu/online"))
    if not words or not cpus:
        return HOST.found("load", Status.UNAVAILABLE, "/proc/loadavg cannot be read")
    each = float(words[0]) / cpus
    evidence = f"{words[0]} tasks in the last minute on {cpus} processors"
    return HOST.found("load", high(each, degraded=HOST.limit("load")), evidence, round(each, 2))


def stalls(root: str) -> Iterator[Finding]:
    """Yield how long tasks stood still for memory and for storage, where the kernel counts that."""
    for resource, most in MAX_STALLED_PERCENT.items():
        match = re.search(r"^full .*avg60=([\d.]+)", _read(root, f"/proc/pressure/{resource}"), re.M)
        if match is None:
            continue
        percent = float(match[1])
        evidence = f"all tasks waited for {resource} during {percent:g} % of the last minute"
        cure = _IO_CURE if resource == "io" else HOST.checks["stalled"].cure
        status = high(percent, degraded=most)
        yield HOST.found("stalled", status, evidence, percent, subject=resource, limit=most, cure=cure)


# These are read through the kernel or slow devices: a microsecond and more instead of some 20 ns.
_SLOW_SOURCES = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 512  # of struct timex there are 208; all zero means: change nothing, only tell


def clock_source(root: str) -> Iterator[Finding]:
    """Yield what the kernel reads the time from."""
    source = _read(root, "/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in _SLOW_SOURCES:
        evidence = f"each reading of the clock goes to {source}, which takes a microsecond or more"
        yield HOST.found("clock_source", Status.DEGRADED, evidence, source)
    elif source:
        yield HOST.found("clock_source", Status.OK, source, source)


def clock(answer: int | None) -> Finding:
    """Return whether the clock is synchronised; `answer` is that of adjtimex(2)."""
    if answer is None:
        return HOST.found("clock", Status.UNAVAILABLE, "adjtimex(2) may not be called")
    if answer == _TIME_ERROR:
        evidence = "nothing keeps this machine's clock right: times of its events cannot be compared with other nodes'"
        return HOST.found("clock", Status.DEGRADED, evidence, "not synchronised")
    return HOST.found("clock", Status.OK, "the kernel's clock is kept right", "synchronised")


def synchronised() -> int | None:
    """Return what adjtimex(2) says of this machine's clock, None where it cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        answer = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return answer if answer >= 0 else None


# A fault of the node outlives the job that met it; anything else was perhaps that job's own doing.
NODE_CATEGORIES = frozenset({"hardware", "network", "storage"})
RECENT_S, RECENT_OF_JOBS_S = 24 * 3600.0, 3600.0
_MAX_RECORDS = 20_000
_RECORD_BYTES = 8192  # the kernel gives one record a read, and none is longer
_CURES = {
    "exclude_node": "drain the node until it was repaired or reset (`dmesg -T`), or start without it",
    "wait": "see to the storage (`dmesg -T`, the file server), then start",
}


@attrs.frozen
class KernelMessage:
    """One message of the kernel, and how many seconds ago it was written."""

    age_s: float
    text: str


def kernel(context: Context) -> Iterator[Finding]:
    """Yield what the kernel's log says (of its last `log_newer_s` seconds), or why it cannot be read."""
    now, newer_s = time.time(), context.log_newer_s
    try:
        log = [record for record in records(context) if newer_s is None or record.age_s <= newer_s]
    except OSError as error:
        cure = "`sysctl kernel.dmesg_restrict=0`, or run the doctor once as root (in a container: on its host)"
        evidence = f"{context.kernel_log} cannot be read: {error.strerror}"
        yield KERNEL.found("kernel_log", Status.UNAVAILABLE, evidence, cure=cure)
        return
    yield from kernel_faults(log, now)


def records(context: Context) -> Iterator[KernelMessage]:
    """Yield what the kernel's log holds, oldest first.

    A line is `priority,sequence,microseconds,flags;message`; others are details of the one before.

    Raises:
        OSError: It may not be read.
    """
    now_s = float((_read(context.root, "/proc/uptime") or "0").split()[0])
    fd = os.open(procfs.below(context.root, context.kernel_log), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(_MAX_RECORDS):
            try:
                data = os.read(fd, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # overwritten by newer ones; the next read goes on with those
            except BlockingIOError:
                return
            if not data:
                return
            for line in data.decode(errors="replace").splitlines():
                head, semicolon, message = line.partition(";")
                numbers = head.split(",")
                if semicolon and len(numbers) >= 3 and numbers[2].isdecimal():
                    yield KernelMessage(now_s - int(numbers[2]) / 1e6, message)
    finally:
        os.close(fd)


def kernel_faults(log: Iterable[KernelMessage], now: float = 0.0) -> Iterator[Finding]:
    """Yield one finding for each cause that the taxonomy sees in the log, or one that there is none. Pure.

    `now` is the Unix time from which the ages of the records count. A kill for memory is told by who was killed: the
    cause is that of a job, and which processes are a job's the log does not tell.
    """
    from resilience_sdk.attribution.log_signs import read_line  # late: only this probe needs the table of causes
    from resilience_sdk.health import memory_kills

    seen: dict[str, list[KernelMessage]] = {}
    count = 0
    for count, record in enumerate(log, 1):  # noqa: B007 - told below
        reading = read_line(record.text)
        # A sign that only follows from another fault, or only hints at one, is no reason to distrust a node.
        if reading is not None and reading.role == "proof":
            seen.setdefault(reading.cause, []).append(record)
    if not seen:
        yield KERNEL.found("kernel_log", Status.OK, f"{count} messages read", 0, unit="faults")
    for name, lines in seen.items():
        if name != memory_kills.CAUSE:
            yield _fault(name, lines, now)
        elif kills := memory_kills.read_kills((now - record.age_s, record.text) for record in lines):
            is_recent = now - kills[-1].at <= RECENT_OF_JOBS_S
            yield memory_kills.of_node(kills, Status.DEGRADED if is_recent else Status.OK)


def _fault(name: str, lines: Sequence[KernelMessage], now: float) -> Finding:
    from resilience_sdk.attribution.taxonomy import lookup

    cause, newest = lookup(name), min(lines, key=lambda record: record.age_s)
    is_recent = newest.age_s <= (RECENT_S if cause.category in NODE_CATEGORIES else RECENT_OF_JOBS_S)
    is_lasting = cause.action == "exclude_node" and cause.persistence == "persistent"
    status = Status.OK if not is_recent else Status.FAILED if is_lasting else Status.DEGRADED
    evidence = f"{cause.meaning}; the last one {_ago(newest.age_s)}: {newest.text.strip()[:300]}"
    data = {"cause": name, "category": cause.category, "at": round(now - newest.age_s, 3)}
    cure = _CURES.get(cause.action, "")
    return KERNEL.found("kernel_log", status, evidence, len(lines), subject=name, limit=0, cure=cure, data=data)


def _ago(age_s: float) -> str:
    for unit, seconds in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit} ago"
    return f"{max(0.0, age_s):.0f} s ago"


_PAUSE_S = 0.3  # a process that only waits for a disk is out of D state by then
_LONGEST_NAME = 40
_MAX_NAMED = 5
# What tells a rank from other programs: the variables of our launcher, and of torchrun.
_RANK_MARKS = (INTERNAL_JOB, "TORCHELASTIC_RUN_ID")


@attrs.frozen
class Process:
    """One line of the process table. `start` is in clock ticks since boot."""

    pid: int
    name: str
    state: str
    parent: int
    start: int
    uid: int


def processes(context: Context) -> Iterator[Finding]:
    """Yield what earlier jobs left behind. Looks at the environment of orphans last: that can block."""
    root, uid = context.root, os.getuid()
    first = process_table(root)
    yield zombies(first)
    time.sleep(_PAUSE_S)
    second = process_table(root)
    found = stuck(first, second)
    proc = procfs.below(root, "/proc")
    yield stuck_finding(found, {p.pid: procfs.text(proc / str(p.pid) / "wchan") or "" for p in found})
    skipped = {process.pid for process in found}
    children_of_init = [p for p in second if p.parent == 1 and p.uid == uid and p.pid not in skipped]
    if "python" in _read(root, "/proc/1/cmdline").partition("\0")[0].rpartition("/")[2]:
        children_of_init = []  # a launcher is process 1, in a container: those are its ranks, and they run
    yield orphans(second, uid, {p.pid: start_environment(proc / str(p.pid)) for p in children_of_init})


def process_table(root: str) -> list[Process]:
    """Return the process table, without kernel threads."""
    found = []
    for entry in procfs.entries(procfs.below(root, "/proc")):
        if not entry.name.isdecimal():
            continue
        head, _, rest = (procfs.text(entry / "stat") or "").rpartition(")")
        words, name = rest.split(), head.partition("(")[2][:_LONGEST_NAME]
        try:
            uid = entry.stat().st_uid
            process = Process(int(entry.name), name, words[0], int(words[1]), int(words[19]), uid)
        except (IndexError, ValueError, OSError):
            continue  # it has just ended
        if process.parent != 2 and process.pid != 2:
            found.append(process)
    return found


def start_environment(process: Path) -> dict[str, str]:
    """Return the variables that a process was started with, by its directory in /proc; what it changed is not seen."""
    pairs = (item.partition("=") for item in (procfs.text(process / "environ") or "").split("\0"))
    return {name: value for name, _, value in pairs}


def zombies(table: Sequence[Process]) -> Finding:
    """Return how many processes have ended and were not collected. Pure."""
    parents = Counter(process.parent for process in table if process.state == "Z")
    count = sum(parents.values())
    most = max(parents, key=parents.__getitem__, default=0)
    evidence = f"{count} ended and were not collected" + (f", {parents[most]} of them by {most}" if count else "")
    cure = f"end process {most}, which does not collect its children; start containers with `docker run --init`"
    status = high(count, degraded=PROCESSES.limit("zombies"))
    return PROCESSES.found("zombies", status, evidence, count, cure=cure)


def stuck(first: Sequence[Process], second: Sequence[Process]) -> list[Process]:
    """Return the processes that are in D state in both looks at the process table. Pure."""
    before = {(process.pid, process.start) for process in first if process.state == "D"}
    return [process for process in second if process.state == "D" and (process.pid, process.start) in before]


def stuck_finding(found: Sequence[Process], where: Mapping[int, str]) -> Finding:
    """Return what is said of processes in D state; `where` names the place in the kernel by pid. Pure."""
    names = [f"{p.pid} ({p.name}{' in ' + where[p.pid] if where.get(p.pid) else ''})" for p in found]
    evidence = f"cannot be stopped or killed, they wait in the kernel: {listed(names, _MAX_NAMED)}" if found else "none"
    data = {"pids": [process.pid for process in found]}
    return PROCESSES.found("stuck_processes", high(len(found), degraded=0), evidence, len(found), data=data)


def orphans(table: Sequence[Process], uid: int, environment: Mapping[int, Mapping[str, str]]) -> Finding:
    """Return which of this user's ranks have outlived their launcher. Pure.

    `environment` holds, by pid, the start environment of processes whose parent is init.
    """
    jobs: dict[int, str] = {}
    for process in table:
        variables = environment.get(process.pid, {})
        mark = next((variables[name] for name in _RANK_MARKS if name in variables), None)
        if process.uid == uid and process.state != "Z" and mark is not None and "RANK" in variables:
            jobs[process.pid] = f"{process.pid} ({process.name}, rank {variables['RANK']} of job {mark})"
    named, pids = listed(jobs.values(), _MAX_NAMED), " ".join(map(str, jobs))
    evidence = f"ranks of an earlier job whose launcher is gone: {named}" if jobs else "none"
    cure = f"`kill {pids}`, then `kill -9 {pids}`: they hold memory, GPUs and ports"
    status, data = high(len(jobs), degraded=0), {"pids": list(jobs)}
    return PROCESSES.found("leftover_ranks", status, evidence, len(jobs), cure=cure, data=data)
