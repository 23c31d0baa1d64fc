"""Stacks of living processes inside a log tell where everybody was."""

import pytest

from resilience_sdk.attribution import diagnose
from resilience_sdk.attribution.log_lines import parse_line
from resilience_sdk.attribution.tracebacks import StackDumps

_START = "".join(f"2026-01-01 00:00:01 INFO [rank{rank}] start world_size=3\n" for rank in range(3))
_TORCH = "/v/lib/python3.12/site-packages/torch"
_C10D = f"{_TORCH}/distributed/distributed_c10d.py"
_BARRIER = [(_C10D, "barrier"), (f"{_TORCH}/distributed/c10d_logger.py", "wrapper")]
_REDUCE = [(f"{_TORCH}/distributed/distributed_c10d.py", "all_reduce"), ("/job/train.py", "step")]
_OPEN = [("/usr/lib/python3.12/pathlib.py", "open"), ("/job/data.py", "shard")]
_LOADER = [
    ("/usr/lib/python3.12/selectors.py", "select"),
    ("/usr/lib/python3.12/multiprocessing/connection.py", "wait"),
    (f"{_TORCH}/utils/data/dataloader.py", "_try_get_data"),
]
_SAVE = [(f"{_TORCH}/serialization.py", "_save"), (f"{_TORCH}/serialization.py", "save"), ("/job/train.py", "keep")]
_LOCK = [("/usr/lib/python3.12/threading.py", "wait"), ("/usr/lib/python3.12/queue.py", "get")]
_WORK = [("/job/eval.py", "score"), ("/job/eval.py", "evaluate")]


def _dump(frames, rank=None, line=7):
    prefix = f"[rank{rank}]: " if rank is not None else ""
    whole = [*frames, ("/job/train.py", "main"), ("/job/train.py", "<module>")]
    lines = ["Timeout (0:05:00)!", "Thread 0x00007f01 (most recent call first):"]
    lines += [f'  File "{file}", line {line} in {name}' for file, name in whole]
    other = [
        "Thread 0x00007f02 [pin_memory] (most recent call first):",
        '  File "/usr/lib/python3.12/threading.py", line 9 in wait',
    ]
    return "".join(f"{prefix}{text}\n" for text in [lines[0], *other, "", *lines[1:]])


def _spied(frames, pid):
    whole = [*frames, ("train.py", "main"), ("train.py", "<module>")]
    shown = "".join(f"    {name} ({file}:9)\n" for file, name in whole)
    return (
        f"Process {pid}: python train.py\nPython v3.12.1 (/usr/bin/python3.12)\n\n"
        f'Thread {pid} (active): "MainThread"\n{shown}Thread {pid + 1} (idle): "Thread-1"\n    wait (threading.py:9)\n'
    )


@pytest.mark.parametrize(
    ("one", "cause"),
    [
        (_OPEN, "filesystem_stall"),
        (_SAVE, "checkpoint_stall"),
        (_LOADER, "dataloader_timeout"),
        (_LOCK, "hang_rank_stuck"),
        (_WORK, "hang_rank_late"),
    ],
)
def test_the_one_that_is_in_no_collective_is_the_culprit(one, cause):
    """The others wait for it, whoever took the dump."""
    found = diagnose(_START + _dump(_REDUCE, 0) + _dump(one, 1) + _dump(_REDUCE, 2))
    assert (found.cause, [culprit.rank for culprit in found.culprits]) == (cause, [1])
    assert found.culprits[0].stack[0].endswith(one[0][1])
    assert diagnose(_START + _spied(_REDUCE, 70) + _spied(one, 80) + _spied(_REDUCE, 90)).cause == cause


def test_all_in_one_collective_were_all_there():
    """At one place of the program nothing between them works; at two its order is wrong; of some, nobody is named."""
    assert diagnose(_START + _dump(_BARRIER) * 3).cause == "network_partition"
    assert diagnose(_START + _dump(_BARRIER) * 2).cause == "nccl_watchdog_timeout"
    assert diagnose(_START + _dump(_BARRIER) + _dump(_REDUCE) * 2).cause == "user_deadlock"


def test_all_in_a_file_is_the_file_system():
    """Nobody waits for a peer."""
    found = diagnose(_START + "".join(_dump(_OPEN, rank) for rank in range(3)))
    assert (found.cause, found.action, len(found.culprits)) == ("filesystem_stall", "wait", 3)


def test_a_dump_of_who_works_or_went_on_is_no_fault():
    """Programs dump their stacks when a step is slow, and go on."""
    steps = "".join(f"2026-01-01 00:00:0{n} INFO [rank0] step {n}0 loss 2\n" for n in range(2, 7))
    steps += "2026-01-01 00:00:09 INFO training finished\n"
    assert diagnose(_START + _dump(_OPEN, 1) + _dump(_REDUCE, 0) + steps).cause == "no_fault"
    assert diagnose(_START + _dump(_WORK, 0) * 3).cause not in ("hang_rank_late", "hang_rank_stuck")


def test_who_dies_prints_its_stack_and_stands_nowhere():
    """The stack below a fatal error is where it happened."""
    fatal = _dump(_LOCK, 1).replace("Timeout (0:05:00)!", "Fatal Python error: Segmentation fault")
    found = diagnose(_START + fatal + _dump(_REDUCE, 0))
    assert (found.cause, [culprit.rank for culprit in found.culprits]) == ("rank_segfault", [1])


def test_an_exception_comes_before_any_stack():
    """The others stand because one is dead."""
    raised = 'Traceback (most recent call last):\n  File "/job/train.py", line 3, in main\nKeyError: 1\n'
    assert diagnose(_START + raised + _dump(_REDUCE, 0) + _dump(_REDUCE, 2)).cause == "user_code_error"


def test_who_cancels_what_stands_is_not_its_cause():
    """Somebody looked at the stacks, then ended the job."""
    cancelled = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
    assert diagnose(_START + _dump(_OPEN, 1) + _dump(_REDUCE, 0) + cancelled).cause == "filesystem_stall"


def test_only_main_threads_of_ranks_are_kept_and_few():
    """Workers and helpers wait by profession; a dump every second for a day takes no memory."""
    dumps = StackDumps()
    worker = [(f"{_TORCH}/utils/data/_utils/worker.py", "_worker_loop")]
    for number, text in enumerate((_dump(worker) + _dump(_OPEN) * 3000).splitlines()):
        dumps.take(parse_line(number, text.encode()), 0)
    dumps.close()
    assert len(dumps.stacks) == 2000
    assert {stack.doing for stack in dumps.stacks} == {"reading"}
