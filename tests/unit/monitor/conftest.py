"""Real rank processes: they answer dump requests as ranks do, and block in the ways in which ranks block."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilience_sdk.core.journal import Journal
from resilience_sdk.monitor.ranks import Target
from resilience_sdk.system.hostinfo import process_start_ticks, process_state

DUMP_SIGNAL = signal.SIGRTMAX - 3

# Each way to block prints "ready" and ends when its standard input does.
_RANK = """
import ctypes, faulthandler, os, signal, sys, threading
from pathlib import Path
from resilience_sdk.rank.helper_thread import HelperThread

stem, how = sys.argv[1].replace("PID", str(os.getpid())), sys.argv[2]
if "no-handler" not in how:
    stacks = open(stem + ".stack", "w")
    faulthandler.register(int(signal.SIGRTMAX - 3), file=stacks, all_threads=False, chain=False)
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = HelperThread(Path(stem), periodic=lambda: None)
helper.start()
if "page" in how:
    import time
    from resilience_sdk.system.hostinfo import process_start_ticks
    from resilience_sdk.recorder.recorder import Recorder
    from resilience_sdk.recorder import page_layout as layout
    from resilience_sdk.recorder.page_writer import RankPage
    page = RankPage.create(
        Path(stem + ".page"), pid=os.getpid(), start_ticks=process_start_ticks(os.getpid()), facts={"script": "t.py"},
        rank=0, local_rank=0, world_size=1, attempt=0, created_ns=time.monotonic_ns(),
    )
    page.set_flag(layout.FLAG_DUMPS, True)
    Recorder(page).block("step", "heartbeat", 1.0).__enter__()

def blocked_here():
    if "gil" in how:
        ctypes.PyDLL(None).system(b"echo ready; read line")
    elif how == "busy":
        ended = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        print("ready", flush=True)
        while not ended.is_set():
            pass
    else:
        print("ready", flush=True)
        sys.stdin.read()

def recurse(depth):
    return [str(depth)] if depth == 0 else recurse(depth - 1)

def run_for_ever():
    while True:
        recurse(8)
        exec("def made(x):\\n return [x]\\nmade(1)", {})

if how == "threads":
    threading.Thread(target=run_for_ever, daemon=True).start()
blocked_here()
"""


class RankProcess:
    """One such process, pinned; `PID` in the name of its files is its process id."""

    def __init__(self, rank: int, stem: Path, how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RANK, str(stem), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout.readline() == b"ready\n"
        pid = self.process.pid
        self.target = Target(
            rank, pid, process_start_ticks(pid), os.pidfd_open(pid), Path(str(stem).replace("PID", str(pid)))
        )

    def stop(self) -> None:
        """Stop it, and return when the kernel says that it stands still."""
        self.target.send(signal.SIGSTOP)
        end = time.monotonic() + 10
        while process_state(self.target.pid) != "T" and time.monotonic() < end:
            time.sleep(0.001)

    def end(self) -> None:
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)
        os.close(self.target.pidfd)


@pytest.fixture
def start_rank(tmp_path):
    """Start ranks with `start_rank(rank, how)`; all are gone after the test."""
    started = []

    def start(rank: int, how: str = "waits", stem: Path | None = None) -> RankProcess:
        started.append(RankProcess(rank, stem or tmp_path / f"a0-r{rank}-{rank}", how))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture
def journal(tmp_path):
    """A journal in a directory of its own."""
    directory = tmp_path / "journal"
    directory.mkdir()
    journal = Journal(directory, writer="monitor", host="h", boot_id="b", job="j")
    yield journal
    journal.close()
