"""The ends of logs of an attempt, from real files."""

import os
import subprocess
import sys

import pytest

from resilience_sdk.postmortem import collect
from resilience_sdk.postmortem.collect import OutsideView, Witness, look_safely
from resilience_sdk.postmortem.facts import RankExit, RankTrace
from resilience_sdk.system import hostinfo

KILLED = "Memory cgroup out of memory: Killed process {} (python) total-vm:9kB, anon-rss:1kB\n"
ILLEGAL = (
    "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: an illegal memory access\n"
)


def kernel_log(path, *messages):
    """Add records as /dev/kmsg gives them, whose later lines are details."""
    with path.open("a") as file:
        for message in messages:
            file.write(f"4,71,9000,-;{message}\n SUBSYSTEM=test;\n")


def test_only_what_the_kernel_said_since_the_mark_counts(tmp_path):
    """An older kill of a process with the same number is another attempt's."""
    path = tmp_path / "kmsg"
    kernel_log(path, KILLED.format(71).strip())
    marked = collect.mark(str(path))
    kernel_log(path, KILLED.format(72).strip())
    found = collect.kernel_findings(marked, [71, 72], oom_seen=None)
    collect.close(marked)
    assert list(found.processes) == [72]
    assert not found.node


def test_a_kernel_log_that_may_not_be_read_is_no_evidence(tmp_path):
    """As on most machines, for most users."""
    marked = collect.mark(str(tmp_path / "none"))
    assert collect.kernel_findings(marked, [1], oom_seen=None) == collect.KernelFindings()
    collect.close(marked)


def test_logs_of_ranks_are_read_where_they_are(tmp_path):
    """A file that is missing, or a pipe that nobody writes into, is passed over."""
    (tmp_path / "err").write_text(ILLEGAL)
    os.mkfifo(tmp_path / "pipe")
    files = {0: [str(tmp_path / "none")], 1: [str(tmp_path / "pipe"), str(tmp_path / "err")], 2: []}
    found = collect.rank_findings(files)
    assert {rank: told.cause for rank, told in found.items()} == {1: "cuda_illegal_memory_access"}


def test_our_own_standard_error_is_read_from_where_it_stood(capfd):
    """Where it is a file, as under a scheduler: what was there before belongs to an earlier attempt."""
    os.write(2, b"OSError: [Errno 28] No space left on device: '/a'\n")
    marked = collect.mark()
    assert collect.own_findings(marked) is None
    os.write(2, ILLEGAL.encode())
    found = collect.own_findings(marked)
    collect.close(marked)
    assert (found.known.cause, found.ranks) == ("cuda_illegal_memory_access", frozenset())


def exits(*codes):
    """Ranks that ended in this order."""
    return [RankExit(rank, rank, 100 + rank, code, rank, rank, False) for rank, code in enumerate(codes)]


def test_logs_are_read_only_where_the_end_alone_does_not_tell(tmp_path):
    """An abort does not; SIGKILL and an exception do, and a restart should not wait for more."""
    (tmp_path / "err").write_text(ILLEGAL)
    traces = {rank: RankTrace(rank, 100 + rank, None, None, None, None) for rank in range(3)}
    witness = Witness.begin(None)
    files = dict.fromkeys(range(3), (str(tmp_path / "err"),))
    seen = witness.look(exits(-6, -9, 0), traces, files, hung=False)
    assert [told.cause for told in seen.told[0]] == ["cuda_illegal_memory_access"]
    assert (seen.told[1], seen.told[2]) == ((), ())
    assert witness.look(exits(-6), traces, files, hung=True).told == {}
    witness.close()


def test_a_failure_of_ours_costs_the_evidence_and_nothing_else():
    """It is noted."""
    noted = []
    assert look_safely(lambda: 1 // 0, noted.append) == OutsideView()
    assert noted == ["ZeroDivisionError: integer division or modulo by zero"]


COUNTS = "from resilience_sdk.system.hostinfo import kernel_counts_as_we_do; print(kernel_counts_as_we_do())"


def test_numbers_of_a_container_are_not_those_of_the_kernels_log():
    """There a process of somebody else's may have the number of a rank: nothing is held against it."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", COUNTS]
    done = subprocess.run(inside, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no namespace can be made here: {done.stderr.strip()[:100]}")
    assert done.stdout.strip() == "False"
    assert hostinfo.kernel_counts_as_we_do() == (os.readlink("/proc/self/ns/pid") == "pid:[4026531836]")


def test_stacks_of_a_program_that_has_faulthandler_itself_are_found_in_its_log(tmp_path):
    """Of each rank in its own log; what an earlier signal has left to us comes first."""
    dump = 'Fatal Python error: Aborted\n\nThread 0x07 (most recent call first):\n  File "train.py", line 9 in step\n'
    (tmp_path / "err").write_text("step 1\n" + dump)
    traces = {rank: RankTrace(rank, 100 + rank, None, None, None, None) for rank in range(3)}
    traces[1] = RankTrace(1, 101, None, None, None, dump.replace("train.py", "ours.py"))
    witness = Witness.begin(None)
    seen = witness.look(exits(-6, -11, 3), traces, dict.fromkeys(range(3), (str(tmp_path / "err"),)), hung=False)
    witness.close()
    assert seen.stacks == {0: dump}
