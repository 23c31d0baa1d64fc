"""Signals, leftovers of ranks, files of an attempt, rendezvous of one node, and the closing lines."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilience_sdk.core.early_signals import has_terminal
from resilience_sdk.launcher import env, last_lines, ranks
from resilience_sdk.launcher.agent import LocalRendezvous
from resilience_sdk.launcher.attempt import AttemptFiles, exception_from_torch
from resilience_sdk.launcher.signals import LeaveRequested, SignalInbox
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.postmortem.outcome import Outcome
from resilience_sdk.system import hostinfo

OUTCOME = Outcome(
    JobVerdict.GIVE_UP, 1, "spent", "job", "/r", "n", 1.0, 2.0, 4, "rank 1 died", ("0001-crash",), None, "again"
)


def test_a_signal_ends_the_wait_and_is_kept():
    """The first request counts, and Ctrl-C at any time; a terminal that closes after SIGTERM is no person's word."""
    before = signal.getsignal(signal.SIGTERM)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, which the inbox leaves so
    with SignalInbox(["SIGTERM", "SIGINT", "SIGHUP", "SIGNONSENSE"]) as inbox:
        os.kill(os.getpid(), signal.SIGTERM)
        inbox.sleep(10)
        os.kill(os.getpid(), signal.SIGHUP)
        inbox.drain()
        assert inbox.request == signal.SIGTERM
        assert not inbox.interrupted
        os.kill(os.getpid(), signal.SIGINT)
        assert inbox.interrupted
        assert (inbox.request, inbox.interrupts) == (signal.SIGTERM, 1 + has_terminal())
    signal.signal(signal.SIGHUP, hang_up)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_leaves_code_that_never_looks():
    """Inside `raising` it is an exception, also when it came before."""
    with SignalInbox(["SIGTERM"]) as inbox:
        with pytest.raises(LeaveRequested), inbox.raising():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(LeaveRequested), inbox.raising():
            pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_children_of_a_dead_rank_are_killed_and_nobody_else():
    """The session of a rank is cleared after it; a recycled pid, which began later than its members, is not ours."""
    code = "import subprocess, sys\nc = subprocess.Popen(['sleep', '60'])\nprint(c.pid, flush=True)"
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
    child = int(leader.stdout.readline())
    leader.stdout.close()
    began = hostinfo.process_start_ticks(leader.pid)
    leader.wait()
    ranks.kill_members({leader.pid: began + 1_000_000})
    assert hostinfo.process_state(child) not in (None, "Z")
    ranks.kill_members({leader.pid: began})
    deadline = time.monotonic() + 5
    while not hostinfo.process_is_gone(child, None) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert hostinfo.process_is_gone(child, None)


def test_garbage_in_the_page_directory_counts_as_missing(tmp_path):
    """Nothing that ranks wrote there can break the launcher, and only an attempt's own files are removed."""
    files = AttemptFiles(tmp_path)
    for name, text in {
        "a0-r0-7.page": "x",
        "a0-r0-7.error.json": "[1]",
        "a0-r1-8.error.json": '{"type": "E", "message": "m", "frames": []}',
        "a1-r0-9.page": "y",
        "verdict-0.json": "{",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    traces = files.traces(0, {0: 7, 1: 8})
    assert traces[0].snapshot is None
    assert traces[0].exception is None
    assert traces[1].exception["type"] == "E"
    assert abs(traces[1].exception_ns - time.monotonic_ns()) < 5e9
    assert files.hang_verdict(0) is None
    (tmp_path / "verdict-0.json").write_text('{"kind": "hang", "incident": "0001-hang"}')
    assert files.hang_verdict(0)["incident"] == "0001-hang"
    files.remove_attempt(0)
    assert {path.name for path in tmp_path.iterdir()} == {"a1-r0-9.page", "verdict-0.json"}
    files.remove_all()
    assert not tmp_path.exists()
    nowhere = AttemptFiles(None)
    nowhere.write_ending(0, "x")
    assert nowhere.traces(0, {0: 7})[0].exception is None


def test_the_first_reason_for_an_ending_stays(tmp_path):
    """A preemption that then has to kill is still a preemption."""
    files = AttemptFiles(tmp_path)
    files.write_ending(2, "preemption")
    files.write_ending(2, "rank failed")
    assert "preemption" in (tmp_path / "ending-2.json").read_text()


def test_torchs_error_file_tells_type_message_and_frames(tmp_path):
    """It is what is left of an exception where the SDK is disabled in the ranks."""
    path = tmp_path / "error.json"
    path.write_text(
        '{"message": {"message": "ValueError: bad: thing", "extraInfo": {"py_callstack": '
        '"Traceback\\n  File \\"/a/t.py\\", line 3, in main\\n    f()\\n  File \\"/a/u.py\\", line 9, in f\\n"}}}'
    )
    found = exception_from_torch(path)
    assert (found["type"], found["message"]) == ("ValueError", "bad: thing")
    assert found["frames"] == ["/a/u.py:9 f", "/a/t.py:3 main"]
    path.write_text('{"message": "To enable traceback see"}')
    assert exception_from_torch(path) is None
    assert exception_from_torch("") is None


def test_one_node_agrees_with_itself_at_once():
    """Rank 0 of 1, a new port each time, and no store that outlives an attempt."""
    handler = LocalRendezvous("id", "127.0.0.1")
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    assert (first.rank, first.world_size, handler.use_agent_store) == (0, 1, False)
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port
    assert handler.num_nodes_waiting() == 0


def test_the_job_key_is_the_schedulers_the_rendezvous_or_our_own():
    """All nodes of a job share it; two launchers on one machine do not, a launcher inside a rank neither."""
    assert env.job_key({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}, None, "h:1") == "slurm-5.0"
    assert env.job_key({}, "x", "h:1") == "elastic-x-h:1"
    own = env.job_key({"TORCHELASTIC_RUN_ID": "outer", "MASTER_ADDR": "a"}, None, "localhost:0")
    assert str(os.getpid()) in own


def test_the_last_lines_say_what_happened_what_is_lost_and_what_to_do():
    """A failed job names the fault, the report, what is saved and the command to go on; a finished one is short."""
    lines = last_lines.closing_lines(OUTCOME)
    text = "\n".join(lines)
    assert lines[0] == "failed: spent (exit code 1)"
    assert "rank 1 died" in text
    assert "/r/incidents/0001-crash/report.md" in text
    assert "nothing saved" in text
    assert "to run it again: again" in text
    finished = Outcome(JobVerdict.FINISHED, 0, "done", "j", "/r", "n", 1.0, 2.0, 1)
    assert last_lines.closing_lines(finished, ["time: 1 s"]) == [
        "finished: done (exit code 0)",
        "time: 1 s",
        "run directory: /r (its page: resilience report /r)",
    ]
    assert last_lines.closing_lines(finished, [], Path("/r/report.html"))[-1] == "page: /r/report.html"
    assert "after 120 steps in /r; whatever came after it" in last_lines.state_line(120, "/r")
    assert "after 1 step in /r" in last_lines.state_line(1, "/r")


def test_a_command_is_offered_where_it_helps():
    """After a stop for good the same command is wrong until somebody has repaired it, after bad hardware on this node.

    What the reason has told (how it was interrupted, what was lost) is not told again.
    """
    ends = {
        verdict: last_lines.closing_lines(
            Outcome(verdict, 1, reason, "j", "/r", "n", 1.0, 2.0, 1, checkpoint=4, resume="x")
        )
        for verdict, reason in (
            (JobVerdict.STOP, "the same error"),
            (JobVerdict.HARDWARE, "a bad GPU"),
            (JobVerdict.PREEMPTED, "by a signal, 0 steps lost"),
            (JobVerdict.INTERRUPTED, "interrupted by the user; 2 steps lost"),
        )
    }
    assert ends[JobVerdict.STOP][-1] == "to run it again, once it is repaired: x"
    assert ends[JobVerdict.HARDWARE][-1] == "to resume on another node: x"
    assert ends[JobVerdict.PREEMPTED][-1] == "to resume: x"
    assert ends[JobVerdict.INTERRUPTED][0] == "interrupted by the user; 2 steps lost (exit code 1)"
    assert "saved: the checkpoint after 4 steps in /r" in ends[JobVerdict.INTERRUPTED]
    assert not any(last_lines.may_wrap(lines[-1]) for lines in ends.values())
    assert all(last_lines.may_wrap(lines[0]) for lines in ends.values())


def test_the_line_of_a_fault_names_its_cause_once():
    """Without the sentence of the taxonomy, which stands in the report."""
    raised = "rank 1 on n raised ValueError: bad"
    assert last_lines.fault_line(raised, "user_code_error") == f"{raised}: user_code_error"
    assert last_lines.fault_line(raised, "unknown") == raised
    hung = "the job hung (rank 1: hang_rank_stopped)"
    assert last_lines.fault_line(hung, "hang_rank_stopped") == hung


def test_only_this_jobs_outcome_is_taken_over(tmp_path):
    """Another job's, or a broken file, tells a node nothing."""
    path = tmp_path / "outcome.json"
    assert last_lines.JobOutcome(path, "job").exit_code() is None
    path.write_text('{"job": "job", "exit_code": 77}')
    assert last_lines.JobOutcome(path, "job").exit_code() == 77
    assert last_lines.JobOutcome(path, "another").exit_code() is None
