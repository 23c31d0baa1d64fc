"""Reading faulthandler's dumps, and what a stack says about waiting and working."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import threading

import pytest

from resilience_sdk.hang.evidence import busy_with, crash_frames, is_in_collective, main_frames, parse_faulthandler

SITE = "/opt/venv/lib/python3.11/site-packages/torch"
DUMP = f"""\
Current thread 0x00007f1e750236c0 (most recent call first):
  File "/app/resilience.py", line 10 in dump
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f1e9a096b80 (most recent call first):
  File "{SITE}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{SITE}/distributed/c10d_logger.py", line 83 in wrapper
  File "/app/train.py", line 23 in main
  File "/app/train.py", line 57 in <module>
"""
ALL_REDUCE = (
    f"{SITE}/distributed/distributed_c10d.py:3252 all_reduce",
    f"{SITE}/distributed/c10d_logger.py:83 wrapper",
    "/app/train.py:23 main",
    "/app/train.py:57 <module>",
)


def test_threads_and_frames():
    """Frames are `file:line function`, innermost first; the main thread is the one nobody bootstrapped."""
    threads = parse_faulthandler(DUMP)
    assert [(t.ident, t.is_current, len(t.frames)) for t in threads] == [
        (0x7F1E750236C0, True, 4),
        (0x7F1E9A096B80, False, 4),
    ]
    assert main_frames(threads) == ALL_REDUCE


def test_dumps_of_one_thread():
    """What the dump signal appends: the main thread alone, without its identity; the last one counts."""
    one = "Stack (most recent call first):\n" + DUMP.split("\n\n")[1].partition("\n")[2]
    later = one.replace("line 23 in main", "line 24 in main")
    assert main_frames(parse_faulthandler(one)) == ALL_REDUCE
    assert "/app/train.py:24 main" in main_frames(parse_faulthandler(one + later))
    assert len(parse_faulthandler(one + later)) == 1


def test_stacks_as_a_helper_thread_writes_them():
    """Named, and the main thread last."""
    text = DUMP.replace("Current thread", "Thread").replace("b80 (most", "b80 [MainThread] (most")
    assert main_frames(parse_faulthandler(text)) == ALL_REDUCE
    assert parse_faulthandler(text)[1].name == "MainThread"


def test_the_last_of_several_dumps():
    """They are appended without anything between them."""
    later = DUMP.replace("line 23 in main", "line 24 in main")
    assert "/app/train.py:24 main" in main_frames(parse_faulthandler(DUMP + later))
    assert len(parse_faulthandler(DUMP + DUMP)) == 2


def test_a_dump_that_is_being_written_is_passed_over():
    """Half a dump would blame whoever comes first in it."""
    later = DUMP.replace("line 23 in main", "line 24 in main")
    for cut in (later[:-9], later[: later.index("\n\n") - 3]):
        assert "/app/train.py:23 main" in main_frames(parse_faulthandler(DUMP + cut))
    assert parse_faulthandler(DUMP[:-9])[0].frames[0] == "/app/resilience.py:10 dump"


def test_names_of_threads():
    """Newer Pythons write them."""
    threads = parse_faulthandler(
        'Current thread 0x01 [MainThread] (most recent call first):\n  File "a b.py", line 1 in f\n'
    )
    assert (threads[0].name, threads[0].frames) == ("MainThread", ("a b.py:1 f",))


@pytest.mark.parametrize("text", ["", "\n\n", "garbage\n  File", "Thread 0x1 (most recent call first):", "\0" * 10])
def test_garbage(text):
    """No dump, no frames, no failure."""
    assert main_frames(parse_faulthandler(text)) == ()


def test_real_dumps(tmp_path):
    """What this Python writes is what is read, twice in one file and with a second thread."""
    done, up = threading.Event(), threading.Event()

    def wait_here():
        up.set()
        done.wait()

    helper = threading.Thread(target=wait_here)
    helper.start()
    up.wait()
    path = tmp_path / "stack"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        faulthandler.dump_traceback(file, all_threads=True)
    done.set()
    helper.join()
    threads = parse_faulthandler(path.read_text())
    assert len({t.ident for t in threads}) == len(threads) >= 2
    assert main_frames(threads)[0].endswith(" test_real_dumps")


@pytest.mark.parametrize(
    "top",
    [
        f"{SITE}/distributed/distributed_c10d.py:3252 all_reduce",
        f"{SITE}/distributed/distributed_c10d.py:5356 barrier",
        f"{SITE}/distributed/rendezvous.py:200 _create_c10d_store",
        f"{SITE}/distributed/_functional_collectives.py:100 wait_tensor",
        f"{SITE}/autograd/graph.py:979 _engine_run_backward",
        f"{SITE}/cuda/__init__.py:954 synchronize",
        f"{SITE}/nn/parallel/distributed.py:842 __init__",
    ],
)
def test_inside_a_collective(top):
    """Collectives, barriers, store waits, the autograd engine, waits for the device."""
    assert is_in_collective([top, "/app/train.py:1 f"])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        ["/app/train.py:7 load"],
        ["/app/hooks.py:1 slow_hook", f"{SITE}/autograd/graph.py:979 _engine_run_backward"],
        ["/usr/lib/python3.11/socket.py:700 readinto", f"{SITE}/utils/data/dataloader.py:1 _next_data"],
        [f"{SITE}/distributed/checkpoint/filesystem.py:10 write_data"],
        [f"{SITE}/nn/modules/linear.py:134 forward"],
    ],
)
def test_outside_a_collective(frames):
    """User code, hooks on top of the engine, data and checkpoint files."""
    assert not is_in_collective(frames)


def test_wrappers_are_looked_through():
    """A dispatcher frame on top says nothing."""
    frames = [f"{SITE}/_ops.py:1 __call__", f"{SITE}/distributed/_functional_collectives.py:1 wait_tensor"]
    assert is_in_collective(frames)


def test_known_slow_work():
    """Compiling and saving are seen; running what was compiled is neither."""
    compiling = ["/usr/lib/subprocess.py:1 wait", f"{SITE}/_inductor/codecache.py:3 compile", "/app/t.py:1 f"]
    saving = [f"{SITE}/serialization.py:900 _save", f"{SITE}/serialization.py:800 save", "/app/t.py:1 f"]
    running = ["/tmp/torchinductor/x.py:9 call", f"{SITE}/_dynamo/eval_frame.py:1 _fn", "/app/t.py:1 f"]
    assert [busy_with(frames) for frames in (compiling, saving, running)] == ["compile", "checkpoint", None]


def test_a_library_that_is_imported_late():
    """Importing in the middle of a step takes long on a shared disk; a training inside an import is no import."""
    importer = "<frozen importlib._bootstrap>:241 _call_with_frames_removed"
    reading = ["<frozen importlib._bootstrap_external>:1042 get_code", "/app/train.py:3 step"]
    executing = ["/usr/lib/python3.11/typing.py:362 inner", f"{SITE}/_dynamo/x.py:1 <module>", importer, reading[1]]
    training = ["/app/job.py:9 step", "/app/job.py:20 <module>", importer, "/app/main.py:1 <module>"]
    own = [f"{SITE}/nn/linear.py:4 forward", *training]
    assert [busy_with(frames) for frames in (reading, executing, training, own)] == ["import", "import", None, None]


def test_a_prompt_inside_the_program(tmp_path):
    """A real breakpoint(), and debuggers of editors, which are no ptrace and no terminal."""
    script = tmp_path / "ask.py"
    script.write_text(
        "import builtins, faulthandler, sys\n"
        "def ask(*_):\n"
        "    faulthandler.dump_traceback(sys.stdout, all_threads=True)\n"
        "    sys.stdout.flush()\n"
        "    sys._exit = __import__('os')._exit(0)\n"
        "builtins.input = ask\n"
        "breakpoint()\n"
        "print()\n"
    )
    run = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert busy_with(main_frames(parse_faulthandler(run.stdout))) == "prompt"
    assert busy_with(["/x/_pydevd_bundle/pydevd_frame.py:9 do_wait_suspend", "/app/t.py:1 f"]) == "prompt"
    assert busy_with(["/app/cmd.py:1 run"]) is None


ABORTING = """
import ctypes, faulthandler, sys, threading
faulthandler.enable(all_threads=True)
libc = ctypes.CDLL(None)
abort = ctypes.cast(libc.abort, ctypes.c_void_p)
def worker():
    libc.abort()
def wait_for_library():
    if sys.argv[1] == "main":
        libc.abort()
    if sys.argv[1] == "python":
        threading.Thread(target=worker).start()
    if sys.argv[1] == "library":
        libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, abort, None)
    threading.Event().wait()
wait_for_library()
"""


@pytest.mark.parametrize(
    ("thread", "function"), [("main", "wait_for_library"), ("python", "worker"), ("library", "wait_for_library")]
)
def test_a_crash_is_told_by_the_thread_that_died_or_else_by_the_main_one(thread, function):
    """A thread of a library's own has no frames; what was asked for before the signal is no stack of the crash."""
    done = subprocess.run([sys.executable, "-c", ABORTING, thread], capture_output=True, text=True, check=False)
    assert done.returncode == -6
    earlier = 'Stack (most recent call first):\n  File "/app/train.py", line 9 in earlier\n'
    frames = crash_frames(earlier + done.stderr)
    assert any(frame.endswith(f" {function}") for frame in frames), done.stderr
    assert crash_frames(earlier) == ("/app/train.py:9 earlier",)
