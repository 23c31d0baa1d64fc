"""`resilience top` on a real job, in a real terminal of 80 columns and 24 lines."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import harness
import needed
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PATIENCE_S = 60.0


@attrs.define
class Screen:
    """A shell in a terminal of tmux's."""

    tmux: tuple[str, ...]
    folder: Path
    env: dict[str, str]

    def __call__(self, *words: str) -> str:
        """Ask tmux."""
        done = subprocess.run([*self.tmux, *words], capture_output=True, text=True, check=True, timeout=30)
        return done.stdout

    def lines(self) -> list[str]:
        """Return what stands on the screen."""
        return self("capture-pane", "-p", "-t", "top").split("\n")[:-1]

    def rows(self) -> list[str]:
        """Return the rows of the table of ranks."""
        return [line for line in self.lines() if line[:6].lstrip(" !?~").isdigit()]

    def top(self, job: harness.Job, name: str, *options: str, run_dir: Path | None = None) -> None:
        """Start `resilience top`; `name` gets its exit code, and the modes of the terminal before and after it."""
        command = shlex.join([sys.executable, "-m", "resilience_sdk", "top", str(run_dir or job.run_dir), *options])
        text = f"stty -a > {name}.before; {command}; echo $? > {name}.code; stty -a > {name}.after; touch {name}.over"
        self("send-keys", "-t", "top", text, "Enter")

    def left(self, name: str) -> int:
        """Wait for the end of it, see that the terminal is as it was, and return the exit code."""
        self.wait((self.folder / f"{name}.over").exists, f"the end of {name}")
        assert (self.folder / f"{name}.before").read_text() == (self.folder / f"{name}.after").read_text()
        assert self("display-message", "-p", "-t", "top", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]
        return int((self.folder / f"{name}.code").read_text())

    def wait(self, happened: Callable[[], bool], what: str) -> None:
        """Wait until something stands on the screen; fail with the screen."""
        until = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < until, f"{what} did not come:\n" + "\n".join(self.lines())
            time.sleep(0.05)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[harness.Job]:
    """Two ranks of an unchanged script that step together for ever."""
    options = ("--nproc-per-node", "2", "--stuck-after", "600")
    with harness.job(tmp_path, *options, "plain.py", "--sgd", "--steps", "1000000") as started:
        started.wait_event("first_beat", count=2)
        yield started


@pytest.fixture
def screen(job: harness.Job, tmp_path: Path) -> Iterator[Screen]:
    """A terminal beside it."""
    tmux = (needed.program("tmux", "tmux"), "-u", "-f", "/dev/null", "-S", str(tmp_path / "tmux"))
    env = {"LC_ALL": "C.UTF-8", "PYTHONPATH": str(harness.PROJECT), "RESILIENCE_PAGE_DIR": str(job.pages)}
    needed.library("rich", "top")
    made = Screen(tmux, tmp_path, env)
    words = [word for pair in env.items() for word in ("-e", "=".join(pair))]
    made("new-session", "-d", "-s", "top", "-x", "80", "-y", "24", "-c", str(tmp_path), *words, "sh")
    yield made
    made("kill-server")


def pid_of(job: harness.Job, rank: int) -> int:
    """The process of a rank."""
    return int(job.events("rank_start", rank=rank)[0]["pid"])


def test_a_rank_that_is_stopped_moves_to_the_top(job: harness.Job, screen: Screen) -> None:
    """Its row says so, the other one waits; it goes back when it goes on, and `q` leaves the terminal as it was."""
    screen.top(job, "looks", "--interval", "0.5")
    screen.wait(lambda: sum("runs" in row for row in screen.rows()) == 2, "two ranks that run")
    assert [row.split()[0] for row in screen.rows()] == ["0", "1"]
    os.kill(pid_of(job, 1), signal.SIGSTOP)
    screen.wait(lambda: [row.split()[0] for row in screen.rows()] == ["!", "0"], "rank 1 above rank 0")
    screen.wait(lambda: "waits" in screen.rows()[1], "rank 0 that waits")
    stopped = screen.rows()[0].split()
    assert (stopped[1], stopped[-1]) == ("1", "stopped")
    assert screen.lines()[-1].startswith("q quit")
    assert len(screen.lines()) == 24
    os.kill(pid_of(job, 1), signal.SIGCONT)
    screen.wait(lambda: sum("runs" in row for row in screen.rows()) == 2, "two ranks that run again")
    screen("send-keys", "-t", "top", "s")
    screen.wait(lambda: "sort: rank" in screen.lines()[-1], "another order")
    screen("send-keys", "-t", "top", "q")
    assert screen.left("looks") == 0


def test_a_run_that_is_to_come_is_waited_for(job: harness.Job, screen: Screen, tmp_path: Path) -> None:
    """One line says so; the table comes with the run, and Ctrl-C ends the wait."""
    place = tmp_path / "later"
    screen.top(job, "waits", run_dir=place)
    screen.wait(lambda: f"waiting for {place}" in "".join(screen.lines()), "the line that says so")
    place.symlink_to(job.run_dir)
    screen.wait(lambda: len(screen.rows()) == 2, "the table")
    screen("send-keys", "-t", "top", "q")
    assert screen.left("waits") == 0
    screen.top(job, "ends", run_dir=tmp_path / "never")
    screen.wait(lambda: "never ...; Ctrl-C ends" in "".join(screen.lines()), "the line that says so")
    screen("send-keys", "-t", "top", "C-c")
    assert screen.left("ends") == 130


def test_the_terminal_is_as_it_was_after_every_end(job: harness.Job, screen: Screen) -> None:
    """Ctrl-C ends with 130, as other commands do, SIGTERM with 143, Ctrl-Z stops it, and the end of the job with 0."""
    screen.top(job, "interrupted")
    screen.wait(lambda: len(screen.rows()) == 2, "the table")
    screen("send-keys", "-t", "top", "C-c")
    assert screen.left("interrupted") == 130
    screen.top(job, "terminated")
    screen.wait(lambda: len(screen.rows()) == 2, "the table")
    (top,) = (pid for pid, words in harness._all_processes() if f"resilience_sdk top {job.run_dir}" in words)
    os.kill(top, signal.SIGTERM)
    assert screen.left("terminated") == 143
    screen("send-keys", "-t", "top", "clear", "Enter")
    screen.top(job, "ended")
    screen.wait(lambda: len(screen.rows()) == 2, "the table")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 75
    assert screen.left("ended") == 0
    told = screen("capture-pane", "-p", "-t", "top", "-S", "-100")
    assert "\nended: preempted, exit code 75" in told, told


def test_a_pipe_gets_plain_text(job: harness.Job, tmp_path: Path) -> None:
    """One look, without a sequence that steers a terminal, from wherever it is asked."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(harness.PROJECT), "RESILIENCE_PAGE_DIR": str(job.pages)}
    command = [sys.executable, "-m", "resilience_sdk", "top", str(job.run_dir)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert sum(line.split()[-1:] == ["runs"] for line in done.stdout.splitlines()) == 2
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
