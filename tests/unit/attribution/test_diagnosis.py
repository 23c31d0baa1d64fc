"""Whole logs: the first fault is named, cascades and handled exceptions are not, silence is evidence."""

import gzip
import io
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.attribution import diagnose
from resilience_sdk.attribution.diagnosis import diagnose_stream
from resilience_sdk.errors import ConfigError
from resilience_sdk.incidents import ACTIONS, Culprit, Evidence, Incident, IncidentStore

_START = "".join(f"2026-01-01 00:00:01 INFO [rank{rank}] start world_size=4\n" for rank in range(4))
_STEPS = _START + "".join(f"2026-01-01 00:00:0{n} INFO [rank0] step {n}0 loss 2.{n}\n" for n in range(2, 6))
_CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:4711"
_TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 9000ms for recv operation to complete"
)
_FAILED = """E0101 00:00:09.000000 77 torch/api.py:9] failed (exitcode: {code}) local_rank: {rank} (pid: {pid}) of b: p
Root Cause (first observed failure):
[0]:
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
"""


def _raise(rank, last, line=9, file="train.py"):
    """What one rank prints when it dies of an exception."""
    prefix = f"[rank{rank}]: "
    return (
        f"{prefix}Traceback (most recent call last):\n"
        f'{prefix}  File "/home/u/{file}", line {line}, in main\n'
        f"{prefix}    loss.backward()\n{prefix}{last}\n"
    )


def _failed(rank, code):
    return _FAILED.format(rank=rank, code=code, pid=100 + rank)


def test_the_first_to_fail_is_the_culprit_and_its_peers_are_not():
    """Connections that close afterwards, and the launcher's choice of a root cause, do not count."""
    log = _STEPS + _raise(2, "ValueError: negative length") + _raise(0, _CLOSED) + _raise(1, _CLOSED) + _failed(0, 1)
    found = diagnose(log)
    assert (found.category, found.cause, found.action) == ("user", "user_code_error", "stop")
    assert [culprit.rank for culprit in found.culprits] == [2]
    assert found.evidence[0].text == "ValueError: negative length"
    assert log.splitlines()[found.evidence[0].line - 1] == "[rank2]: ValueError: negative length"


def test_peers_that_print_first_do_not_become_the_cause():
    """The victims' output may reach the log before the culprit's."""
    log = _STEPS + _raise(0, _CLOSED) + _raise(1, _CLOSED) + _raise(3, "IndexError: out of range") + _failed(0, 1)
    found = diagnose(log)
    assert (found.cause, [c.rank for c in found.culprits]) == ("user_code_error", [3])


def test_the_same_exception_on_all_ranks_names_all():
    """They share the fault."""
    log = _START + "".join(_raise(rank, "TypeError: no") for rank in (1, 0, 3, 2))
    assert sorted(c.rank for c in diagnose(log).culprits) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("code", "cause"), [(-9, "rank_killed_sigkill"), (-11, "rank_segfault"), (-7, "rank_bus_error"), (-6, "rank_abort")]
)
def test_a_signal_is_told_by_the_launcher(code, cause):
    """A rank that dies without a word is known by its exit code alone."""
    found = diagnose(_STEPS + _raise(0, _CLOSED) + _raise(2, _CLOSED) + _failed(1, code))
    assert (found.cause, [c.rank for c in found.culprits]) == (cause, [1])


def test_the_kernel_explains_a_kill():
    """SIGKILL with the memory killer's line, even hours of log later, is out of memory."""
    killer = "[1922.0] Memory cgroup out of memory: Killed process 101 (python3) total-vm:2252596kB\n"
    found = diagnose(_STEPS + _raise(0, _CLOSED) + _failed(1, -9) + killer)
    assert (found.cause, found.action) == ("host_oom_kill", "restart")


def test_the_driver_explains_what_the_program_says():
    """A CUDA error is the consequence where the GPU fell off the bus."""
    log = _raise(1, "RuntimeError: CUDA error: unspecified launch failure")
    xid = "[99.5] NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    assert diagnose(log).category != "hardware" or diagnose(log).cause == "gpu_cuda_unknown_error"
    assert diagnose(log + xid).cause == "gpu_fell_off_bus"


def test_a_watchdog_alone_names_nobody():
    """It says that a collective did not end, not why."""
    watchdog = (
        "[rank{0}]:[E1120 22:30:10.617816859 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600011 ms.\n"
    )
    alone = diagnose(watchdog.format(1) + watchdog.format(2))
    assert (alone.cause, alone.culprits) == ("nccl_watchdog_timeout", ())
    assert alone.confidence <= 0.5
    full = "2026-01-01 00:00:00 ERROR [rank3] could not write: [Errno 28] No space left on device\n"
    assert diagnose(full + watchdog.format(1)).cause == "storage_full"


@pytest.mark.parametrize(
    ("last_words", "cause"),
    [
        ("saving checkpoint to ckpt/step_40.pt", "checkpoint_stall"),
        ("reading shard /data/train-0007.bin", "filesystem_stall"),
        ("building the index of samples", "hang_rank_late"),
        ("step 40 loss 2.1", "hang_rank_stopped"),
    ],
)
def test_the_silent_rank_is_the_suspect_and_its_last_words_the_evidence(last_words, cause):
    """Everybody else timed out waiting."""
    said = f"2026-01-01 00:00:07 INFO [rank2] {last_words}\n"
    found = diagnose(_STEPS + said + "".join(_raise(rank, _TIMED_OUT) for rank in (1, 0, 3)))
    assert (found.cause, [c.rank for c in found.culprits]) == (cause, [2])
    assert last_words in found.evidence[0].text


def test_a_rank_that_was_done_left_the_others_waiting():
    """One rank had fewer batches."""
    said = "2026-01-01 00:00:07 INFO [rank3] epoch done\n"
    found = diagnose(_STEPS + said + "".join(_raise(rank, _CLOSED) for rank in (1, 0, 2)))
    assert (found.cause, found.action, [c.rank for c in found.culprits]) == ("user_uneven_inputs", "stop", [3])


def test_a_rank_that_left_in_good_order_is_not_called_killed():
    """Had it died, the launcher would have seen it fail first."""
    log = _STEPS + "".join(_raise(rank, _CLOSED) for rank in (1, 0, 2))
    assert diagnose(log + _failed(2, 1)).cause == "user_uneven_inputs"
    assert diagnose(log).cause == "rank_killed_sigkill"


def test_all_ranks_waiting_at_one_place_is_the_network_at_several_the_program():
    """A partition stops all in the same collective; a deadlock in different ones."""
    same = "".join(_raise(rank, _TIMED_OUT) for rank in range(4))
    differing = "".join(_raise(rank, _TIMED_OUT, line=9 + rank % 2) for rank in range(4))
    assert diagnose(_STEPS + same).cause == "network_partition"
    assert diagnose(_STEPS + differing).cause == "user_deadlock"


def test_a_process_that_the_launcher_had_to_kill_stood_still():
    """It did not hear SIGTERM, so SIGKILL was the launcher's, and says nothing about memory."""
    deaf = "W0101 00:00:39.000000 77 torch/api.py:9] Unable to shutdown process 102 via 15, forcefully exiting via 9\n"
    log = _STEPS + "".join(_raise(rank, _TIMED_OUT) for rank in (0, 1, 3)) + deaf + _failed(0, 1) + _failed(2, -9)
    found = diagnose(log)
    assert (found.cause, [c.rank for c in found.culprits]) == ("hang_rank_stopped", [2])


def test_a_run_that_finished_has_no_fault():
    """Warnings, retried exceptions and logged tracebacks do not count."""
    handled = "2026-01-01 00:00:03 WARNING [rank0] upload failed, will retry\n" + _raise(0, "ConnectionError: reset")
    done = "2026-01-01 00:00:09 INFO [rank0] training finished at step 80\n"
    for log in (_STEPS + done, _STEPS + handled + _STEPS + done):
        found = diagnose(log)
        assert (found.category, found.cause, found.action) == ("none", "no_fault", "none")


def test_another_rank_that_ends_its_epoch_does_not_make_the_run_finished():
    """Only the words of a whole run say that nothing was wrong with it."""
    ended = "2026-01-01 00:00:08 INFO [rank0] epoch 3 done\n"
    found = diagnose(_STEPS + _raise(1, "ValueError: bad sample") + ended)
    assert (found.cause, [c.rank for c in found.culprits]) == ("user_code_error", [1])


def test_what_is_retried_counts_only_where_the_job_fails_all_the_same():
    """Retried exceptions are no fault of a run that finishes; of one that does not tell its end nothing is known."""
    finished = "2026-01-01 00:00:09 INFO training finished\n"
    retried = "2026-01-01 00:00:03 ERROR [rank0] upload failed, will retry\n" + _raise(0, "ConnectionError: reset")
    unlabelled = retried.replace("[rank0]: ", "")
    for log in (_STEPS + retried * 3, _STEPS + unlabelled * 3):
        assert diagnose(log + finished).cause == "no_fault"
        assert diagnose(log).cause == "unknown"
    assert diagnose(_STEPS + retried * 3 + _failed(0, 1)).cause == "external_service"


def test_an_abort_after_the_watchdog_is_the_watchdogs():
    """NCCL ends the process when it gives up: the abort is no cause."""
    log = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)\n"
    log += "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    log += "  what():  [Rank 1] some collective is late\nAborted (core dumped)\n"
    assert diagnose(log).cause == "nccl_watchdog_timeout"


def test_an_exception_that_was_survived_gives_way_to_the_last_one():
    """Progress after it says that it was handled; what came at the end was not."""
    early = _raise(0, "requests.exceptions.ConnectionError: Max retries exceeded")
    found = diagnose(_STEPS + early + _STEPS + _raise(0, "KeyError: 'lr'") + _failed(0, 1))
    assert found.cause == "user_code_error"


def test_a_loss_that_is_nan_counts_though_the_run_went_on():
    """Nobody stops a run that computes nonsense."""
    nan = "2026-01-01 00:00:07 INFO [rank0] step 60 loss nan\n"
    found = diagnose(_STEPS + nan + "2026-01-01 00:00:09 INFO [rank0] training finished\n")
    assert (found.cause, found.action) == ("nan_loss", "rollback")


def test_of_a_chain_the_telling_exception_counts():
    """`During handling of` hides the cause behind what came of it."""
    first, then = _raise(0, "OSError: [Errno 28] No space left on device"), _raise(0, "RuntimeError: could not save")
    chain = "[rank0]: \n[rank0]: During handling of the above exception, another exception occurred:\n[rank0]: \n"
    assert diagnose(_STEPS + first + chain + then).cause == "storage_full"


def test_a_scheduler_that_cancels_after_a_crash_is_not_the_cause():
    """Slurm ends the step because a task failed; alone, the same line is a person's."""
    cancelled = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
    crash = "srun: error: n1: task 3: Segmentation fault (core dumped)\n"
    found = diagnose(crash + cancelled)
    assert (found.cause, [c.rank for c in found.culprits]) == ("rank_segfault", [3])
    assert diagnose(cancelled).cause == "slurm_cancelled"
    assert diagnose("received signal 15, exiting\n" + cancelled).cause == "slurm_cancelled"


def test_an_asked_for_stop_is_not_the_fault_of_its_teardown():
    """After SIGTERM ranks lose each other."""
    asked = "2026-01-01 00:00:07 WARNING [rank1] received signal 15, will save and exit\n"
    found = diagnose(_STEPS + asked + _raise(0, _CLOSED) + _failed(0, 1))
    assert (found.cause, found.action) == ("preemption_sigterm", "requeue")


def test_the_launchers_own_sigterm_is_no_preemption():
    """torchrun asks the others to leave when a rank has died; their handlers say what a preempted job says."""
    torn = "W0101 00:00:08.000000 77 torch/api.py:1028] Sending process 100 closing signal SIGTERM\n"
    asked = "2026-01-01 00:00:08 WARNING [rank0] received signal 15, will save and exit\n"
    raised = _raise(2, "lightning.pytorch.utilities.exceptions.SIGTERMException")
    assert diagnose(_STEPS + torn + asked + raised + _failed(1, -9)).cause == "rank_killed_sigkill"
    assert diagnose(_STEPS + asked + torn + _failed(1, 1)).cause == "preemption_sigterm"


def test_what_cannot_be_told_is_unknown_with_what_was_seen():
    """A launcher that reports a failure of which nothing else is said."""
    found = diagnose(_STEPS + "srun: error: n1: task 3: Exited with exit code 1\n")
    assert found.cause == "unknown"
    assert "task 3" in found.evidence[0].text
    assert diagnose(b"").cause == "unknown"


def test_progress_bars_colours_and_windows_lines():
    """A terminal's log: the words between carriage returns are lines of their own, with the number of the whole."""
    log = b"\r 10%\r 20%\rslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\r\n"
    found = diagnose(b"\x1b[1mstart\x1b[0m\r\n" + log)
    assert (found.cause, found.evidence[0].line) == ("slurm_time_limit", 2)


def test_sources(tmp_path):
    """A path, a compressed file, text, bytes, a stream and an exception all get a verdict."""
    text = _STEPS + _raise(1, "OSError: [Errno 30] Read-only file system: '/x'")
    plain, packed = tmp_path / "job.log", tmp_path / "job.log.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    for source in (plain, str(plain), packed, text, text.encode(), io.BytesIO(text.encode())):
        assert diagnose(source).cause == "storage_readonly"
    packed.write_bytes(gzip.compress(text.encode() * 50)[:-20])
    assert diagnose(packed).cause == "storage_readonly"
    try:
        raise PermissionError(13, "Permission denied", "/x")
    except PermissionError as error:
        found = diagnose(error)
    assert (found.cause, found.action) == ("storage_permission", "stop")
    assert "test_diagnosis.py" in found.culprits[0].stack[0]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank3.log", 3), ("job_rank_12.err", 12), ("rank-4.txt", 4), ("none/attempt_0/2/stderr.log", 2), ("7.log", None)],
)
def test_the_rank_of_a_file_is_in_its_name(tmp_path, name, rank):
    """A log of one rank names that rank as the culprit though no line does."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('Traceback (most recent call last):\n  File "/h/t.py", line 3, in f\n    x\nValueError: bad\n')
    assert [culprit.rank for culprit in diagnose(path).culprits] == ([] if rank is None else [rank])


def test_a_run_directory_gives_its_newest_incident(tmp_path):
    """What the launcher saw is better than any log."""
    store = IncidentStore(tmp_path)
    incident = Incident(
        kind="crash",
        category="cuda",
        cause="cuda_oom",
        action="stop",
        confidence=0.9,
        culprits=(Culprit(3, "n1", step=7),),
        evidence=(Evidence("exception", "torch.OutOfMemoryError"),),
    )
    store.create("crash", incident)
    found = diagnose(tmp_path)
    assert (found.cause, found.culprits[0].rank, found.culprits[0].step) == ("cuda_oom", 3, 7)
    with pytest.raises(ConfigError, match="no run directory"):
        diagnose(tmp_path / "incidents")


def test_the_json_has_every_key():
    """The schema of the contract."""
    data = diagnose(_STEPS + _raise(1, "ValueError: x")).to_json()
    assert set(data) == {"category", "cause", "action", "confidence", "culprits", "evidence"}
    assert set(data["evidence"][0]) == {"source", "line", "text"}
    assert set(data["culprits"][0]) == {"rank", "node", "step", "section", "stack"}


_PIECES = st.sampled_from(
    [
        b"Traceback (most recent call last):\n", b'  File "t.py", line 1, in f\n', b"ValueError: x\n", b"[rank1]: ",
        b"During handling of the above exception, another exception occurred:\n", b"\r", b"\n", b"\x1b[31m", b"\xff",
        b"error ", b"failed (exitcode: -9) local_rank: 0 (pid: 1) of binary\n", b"  rank      : 3 (local_rank: 3)\n",
        b"NVRM: Xid (PCI:0000:1): 79, ", b"step 10 loss nan\n", b"Original Traceback (most recent call last):\n",
        b"Thread 0x7f (most recent call first):\n", b'  File "t.py", line 1 in open\n', b"[rank2]: it took 900 s\n",
        b"Timed out waiting 9ms for recv operation\n", b"CalledProcessError: Command 'sh' died with <Signals.SIGX: 1",
        b"--- Logging error ---\n", b"Connection closed by peer\n", b"world_size=4\n", b"\x1f\x8b", b"((((([[[[\n",
    ]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(_PIECES, st.binary(max_size=40)), max_size=60).map(b"".join))
def test_any_bytes_get_a_verdict(data):
    """Nothing in a log crashes the reader, and every verdict is one of the taxonomy."""
    found = diagnose(data)
    assert found.action in ACTIONS
    assert 0 < found.confidence < 1
    assert found.evidence


class _Endless:
    """A stream of one line again and again, never held in memory."""

    def __init__(self, line, blocks):
        self._block = line * ((1 << 16) // len(line))
        self._left = blocks

    def read(self, size):
        self._left -= 1
        return self._block if self._left >= 0 else b""

    def peek(self, size):
        return self._block[:size]


@pytest.mark.parametrize(
    "line",
    [
        b"2026-01-01 00:00:00 INFO [rank0] step 7 loss 2.5\n",
        b"Traceback (most recent call last):\n",
        b"[rank3]: ValueError: x failed with an error\n",
        b"error error error ",
        b"\r 10% error",
        b"                                        error\n",
        b"NVRM: Xid (PCI:0000:91:00): 79, GPU has fallen off the bus\n",
        b"Thread 0x7f00 (most recent call first):\n",
        b'  File "t.py", line 1 in f\nThread 0x7f00 (most recent call first):\n',
        b"subprocess.CalledProcessError: Command 'sh t.sh' returned non-zero exit status 3.\n",
    ],
)
def test_time_grows_with_the_length_and_no_faster(line):
    """Four times the log takes about four times as long, whatever its lines are."""

    def seconds(blocks):
        start = time.process_time()
        diagnose_stream(_Endless(line, blocks), "made up")
        return time.process_time() - start

    seconds(1)
    assert seconds(4) <= 10 * max(seconds(1), 0.05)


def test_a_warning_of_what_was_worked_around_is_no_fault():
    """Who warns goes on."""
    warned = "2026-01-01 00:00:01 WARNING [rank0] No checkpoint found in out/, starting from scratch\n"
    finished = "2026-01-01 00:00:09 INFO training finished\n"
    assert diagnose(warned + finished).cause == "no_fault"
    assert diagnose(warned + _STEPS + finished).cause == "no_fault"
