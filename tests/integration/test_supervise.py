"""`resilience supervise` as a real process, around real commands: what is run again, what is not, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import needed
import pytest
from checkpoint_files import leave_checkpoint
from told_fleet import ToldFleetRun

from resilience_sdk.core.journal import read_journal
from resilience_sdk.core.lease import STALE_AFTER_S, Lease
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.history.indexer import Index
from resilience_sdk.system.hostinfo import host_name, process_is_gone

PROJECT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")


@attrs.define
class Supervised:
    """One supervisor; `told` is the folder in which its command writes."""

    process: subprocess.Popen[bytes]
    told: Path
    run_dir: Path
    log: Path

    @property
    def screen(self) -> str:
        return self.log.read_text(errors="replace")

    def finish(self, timeout_s: float = 60.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the supervisor did not end:\n{self.screen}") from None

    def runs(self) -> int:
        """Return how often the command began."""
        path = self.told / "runs"
        return len(path.read_text().split()) if path.exists() else 0

    def decisions(self) -> list[dict]:
        events = read_journal(self.run_dir / "journal").events
        return [event for event in events if event["event"] == "decision" and event.get("what") == "supervise"]

    def wait(self, happened: Callable[[], bool], what: str, timeout_s: float = 40.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.screen}"
            time.sleep(0.01)


@contextlib.contextmanager
def supervised(
    folder: Path, *command: str, options: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Iterator[Supervised]:
    """Start a supervisor in a session of its own, and end it and its command at the end."""
    told, run_dir, log = folder / "told", folder / "run", folder / "log"
    told.mkdir()
    pages = folder / "pages"
    pages.mkdir()
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    own |= {"PYTHONPATH": str(PROJECT), "TOLD": str(told), "RESILIENCE_PAGE_DIR": str(pages), "PY": sys.executable}
    words = [sys.executable, "-m", "resilience_sdk", "supervise", "--run-dir", str(run_dir), "--retry-delay", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*words, *options, "--", *command],
            cwd=SCRIPTS,
            env=own | (env or {}),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield Supervised(process, told, run_dir, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def shell(text: str) -> tuple[str, ...]:
    """Return a command that counts its runs, `$n` being the number of this one."""
    return ("sh", "-c", f'echo run >> "$TOLD/runs"; n=$(wc -l < "$TOLD/runs"); {text}')


def test_runs_again_until_the_command_ends_well(tmp_path):
    """Two failures are forgiven; every run has the same directory and the same finished flag; all is journalled."""
    text = 'echo "$RESILIENCE_RUN_DIR $FAULT_TOL_FINISHED_FLAG_FILE" >> "$TOLD/where"; [ "$n" = 3 ]'
    with supervised(tmp_path, *shell(text)) as job:
        assert job.finish() == 0, job.screen
        assert job.runs() == 3
        where = (job.told / "where").read_text().splitlines()
        assert set(where) == {f"{job.run_dir} {job.run_dir}/finished"}
        assert [(event["run"], event["code"], event["verdict"]) for event in job.decisions()] == [
            (1, 1, "restart"),
            (2, 1, "restart"),
            (3, 0, "finished"),
        ]


def test_the_budget_is_spent(tmp_path):
    """One retry is allowed, so there are two runs, and the exit code is 1 whatever the command's was."""
    with supervised(tmp_path, *shell("exit 9"), options=("--max-job-retries", "1")) as job:
        assert job.finish() == 1
        assert job.runs() == 2
        assert "its 1 job retry is spent" in job.screen
        assert f"to run it again: resilience supervise --run-dir {job.run_dir} -- sh -c" in job.screen


def test_a_killed_command_is_run_again(tmp_path):
    """kill -9 of the command from outside is a failure like others."""
    with supervised(tmp_path, *shell('[ "$n" = 2 ] || { echo $$ > "$TOLD/pid"; exec sleep 600; }')) as job:
        job.wait(lambda: (job.told / "pid").exists() and (job.told / "pid").read_text().strip() != "", "the command")
        os.kill(int((job.told / "pid").read_text()), signal.SIGKILL)
        assert job.finish() == 0
        assert job.runs() == 2
        assert "it was killed by SIGKILL; job retry 1 of 2" in job.screen
        assert job.decisions()[0]["code"] == -9


def test_the_flag_of_nvidia_s_auto_resume_ends_the_loop(tmp_path):
    """The command creates the file of FAULT_TOL_FINISHED_FLAG_FILE, and fails: training is complete all the same.

    Started again, the supervisor runs nothing.
    """
    flag = tmp_path / "flag"
    env = {"FAULT_TOL_FINISHED_FLAG_FILE": str(flag)}
    command = shell('[ "$n" = 1 ] || touch "$FAULT_TOL_FINISHED_FLAG_FILE"; exit 1')
    with supervised(tmp_path, *command, env=env) as job:
        assert job.finish() == 0, job.screen
        assert job.runs() == 2
        assert flag.exists()
    (tmp_path / "again").mkdir()
    with supervised(tmp_path / "again", *command, env=env) as job:
        assert job.finish() == 0
        assert job.runs() == 0
        assert "is finished" in job.screen


@pytest.mark.parametrize(
    ("code", "word", "goes_on"),
    [
        (77, "stop", "to run it again, once it is repaired"),
        (76, "hardware", "to run it again on another node"),
        (130, "interrupted", "to run it again"),
    ],
)
def test_verdicts_that_another_run_cannot_change(tmp_path, code, word, goes_on):
    """One run, the command's own code, and last the line that goes on: when or where that makes sense."""
    with supervised(tmp_path, *shell(f"exit {code}")) as job:
        assert job.finish() == code
        assert job.runs() == 1
        assert job.decisions()[0]["verdict"] == word
        assert f"supervise: {goes_on}: resilience supervise --run-dir {job.run_dir} -- sh -c" in job.screen


@pytest.mark.parametrize("code", [75, 76, 77])
def test_an_outcome_counts_where_the_exit_code_hides_it(tmp_path, code):
    """torchrun leaves with 1 whatever happened; what this run's outcome says is taken, an older one is not."""
    text = f'echo \'{{"exit_code": {code}}}\' > "$RESILIENCE_RUN_DIR/outcome.json"; exit 1'
    with supervised(tmp_path, *shell(f'[ "$n" = 1 ] || exit 5; {text}'), options=("--max-job-retries", "1")) as job:
        assert job.finish() == (1 if code == 75 else code), job.screen
        assert [event["code"] for event in job.decisions()] == ([75, 5, 5] if code == 75 else [code])


def test_preemptions_are_no_failures_and_do_not_spin(tmp_path):
    """With no retry allowed it is run again after 75; three that brought nothing end the loop with 75, and say so."""
    options = ("--max-job-retries", "0")
    with supervised(tmp_path, *shell('[ "$n" = 3 ] || exit 75'), options=options) as job:
        assert job.finish() == 0
        assert job.runs() == 3
    (tmp_path / "ever").mkdir()
    with supervised(tmp_path / "ever", *shell("exit 75"), options=options) as job:
        assert job.finish() == 75
        assert job.runs() == 3
        assert "3 times in a row within 60 s and without a new checkpoint" in job.screen


def test_a_preempted_run_that_saved_goes_on(tmp_path):
    """A new checkpoint in each run: six preemptions, then a seventh run. A request that was obeyed is gone."""
    for step in range(1, 7):
        leave_checkpoint(tmp_path / "made", step)
    checkpoint = f'cp -r "{tmp_path}/made/checkpoints/step-0000000$n" "$RESILIENCE_RUN_DIR/checkpoints"'
    text = f'[ -e "$RESILIENCE_RUN_DIR/preempt" ] && exit 9; touch "$RESILIENCE_RUN_DIR/preempt"; {checkpoint}; exit 75'
    with supervised(tmp_path, *shell(f'[ "$n" = 7 ] && exit 0; {text}'), options=("--max-job-retries", "0")) as job:
        assert job.finish() == 0, job.screen
        assert job.runs() == 7
        assert "from the checkpoint after 6 steps" in job.screen


@pytest.mark.parametrize(
    ("words", "message"), [(["no-such-program"], "command not found"), (["sh", "-c", "nope"], "127")]
)
def test_a_command_that_cannot_be_found_is_bad_usage(tmp_path, words, message):
    """Neither we nor a shell can start it: one run at most, 2, and a line that says what to check."""
    with supervised(tmp_path, *words) as job:
        assert job.finish() == 2
        assert message in job.screen
        assert "check the" in job.screen


@pytest.mark.parametrize(
    ("number", "code", "ending"),
    [(signal.SIGTERM, 75, "exit 75"), (signal.SIGTERM, 75, "exit 0"), (signal.SIGINT, 130, "exit 1")],
)
def test_a_signal_is_passed_on_and_ends_the_loop(tmp_path, number, code, ending):
    """The command hears it once, may save, and is not run again, whatever it leaves with."""
    name = number.name.removeprefix("SIG")
    text = f'trap \'echo {name} >> "$TOLD/heard"; {ending}\' {name}; touch "$TOLD/up"; while :; do sleep 0.05; done'
    with supervised(tmp_path, *shell(text)) as job:
        job.wait((job.told / "up").exists, "the command")
        job.process.send_signal(number)
        assert job.finish() == code, job.screen
        assert (job.told / "heard").read_text().split() == [name]
        assert job.runs() == 1


def test_each_signal_is_passed_on_and_ctrl_c_is_final(tmp_path):
    """The second SIGTERM reaches the command as the first did. A person who then types Ctrl-C ends the job: 130."""
    heard = "".join(f"trap 'echo {name} >> \"$TOLD/heard\"' {name}; " for name in ("TERM", "INT"))
    text = heard + 'touch "$TOLD/up"; while ! grep -qs INT "$TOLD/heard"; do sleep 0.05; done; exit 75'
    with supervised(tmp_path, *shell(text)) as job:
        job.wait((job.told / "up").exists, "the command")
        heard = job.told / "heard"
        for count, number in enumerate((signal.SIGTERM, signal.SIGTERM, signal.SIGINT), 1):
            job.process.send_signal(number)
            job.wait(lambda n=count: heard.exists() and len(heard.read_text().split()) == n, f"{number.name}")
        assert job.finish() == 130, job.screen
        assert heard.read_text().split() == ["TERM", "TERM", "INT"]
        assert job.runs() == 1


_DEAF = shell('trap "" TERM INT; touch "$TOLD/up"; sleep 600 & echo $! > "$TOLD/pid"; while :; do wait; done')


@pytest.mark.slow
def test_a_command_that_does_not_leave_is_ended(tmp_path):
    """It has preempt_time, the launcher's own grace and ten seconds, said at once; then it and its children end."""
    env = {"RESILIENCE_PREEMPT_TIME": "0.2", "RESILIENCE_TERM_GRACE": "0.1"}
    with supervised(tmp_path, *_DEAF, env=env) as job:
        job.wait((job.told / "up").exists, "the command")
        began = time.monotonic()
        job.process.terminate()
        assert job.finish() == 75, job.screen
        assert time.monotonic() - began > 10.0
        assert "it has 10 s to leave" in job.screen
        assert "it has not left within 10 s: SIGKILL" in job.screen
        pid = int((job.told / "pid").read_text())
        job.wait(lambda: process_is_gone(pid, None), "the end of its child")


def test_the_third_ctrl_c_ends_a_deaf_command(tmp_path):
    """The first asks, the second hurries, the third does not ask; the code is a person's."""
    text = 'trap \'echo INT >> "$TOLD/heard"\' INT; touch "$TOLD/up"; while :; do sleep 0.05; done'
    with supervised(tmp_path, *shell(text)) as job:
        job.wait((job.told / "up").exists, "the command")
        heard = job.told / "heard"
        for count in (1, 2):  # one after the other: signals that are pending together are one
            job.process.send_signal(signal.SIGINT)
            job.wait(lambda n=count: heard.exists() and len(heard.read_text().split()) == n, "Ctrl-C")
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130, job.screen
        assert "Ctrl-C: SIGKILL" in job.screen


def test_a_wrapper_that_dies_of_the_signal_does_not_cut_the_save_short(tmp_path):
    """The shell has no handler and is gone at once; what it started still saves, and then the supervisor ends."""
    inner = 'trap "sleep 0.5; touch $TOLD/saved; exit 75" TERM; touch $TOLD/up; while :; do sleep 0.05; done'
    with supervised(tmp_path, *shell(f"sh -c '{inner}'; echo never")) as job:
        job.wait((job.told / "up").exists, "the command")
        job.process.terminate()
        assert job.finish() == 75, job.screen
        assert (job.told / "saved").exists()


def test_nothing_of_a_failed_command_is_left(tmp_path):
    """A process in its background that ignores SIGTERM gets the grace, then SIGKILL, before the next run."""
    text = '[ "$n" = 1 ] || exit 0; (trap "" TERM; echo up > "$TOLD/up"; exec sleep 600) & echo $! > "$TOLD/pid"; '
    wait = 'while [ ! -e "$TOLD/up" ]; do sleep 0.01; done; exit 4'
    with supervised(tmp_path, *shell(text + wait), env={"RESILIENCE_PREEMPT_TIME": "0.3"}) as job:
        assert job.finish() == 0, job.screen
        pid = int((job.told / "pid").read_text())
        job.wait(lambda: process_is_gone(pid, None), "the end of the background process")
        assert job.runs() == 2


def test_a_killed_supervisor_asks_its_command_to_leave(tmp_path):
    """SIGKILL of the supervisor: the kernel sends the command SIGTERM, and it can save."""
    text = 'trap \'touch "$TOLD/asked"; exit 75\' TERM; touch "$TOLD/up"; while :; do sleep 0.05; done'
    with supervised(tmp_path, *shell(text)) as job:
        job.wait((job.told / "up").exists, "the command")
        job.process.kill()
        job.wait((job.told / "asked").exists, "SIGTERM")


def test_a_signal_between_two_runs_ends_the_loop(tmp_path):
    """While it waits to run the command again there is nobody to pass a signal on to."""
    with supervised(tmp_path, *shell("exit 3"), options=("--retry-delay", "30")) as job:
        job.wait(lambda: "running it again in 30 s" in job.screen, "the pause")
        job.process.terminate()
        assert job.finish() == 75
        assert job.runs() == 1


def lease_of(run: RunDirectory, **changes: object) -> None:
    """Write the lease of a job whose process is this test's own."""
    Lease.acquire(run, "other")
    run.lease.write_text(json.dumps({**json.loads(run.lease.read_text()), **changes}))


def test_a_directory_in_use_is_refused(tmp_path):
    """A living job on this host holds it: the launcher says so, and another run would not change that."""
    lease_of(RunDirectory.create(tmp_path / "run"))
    with supervised(tmp_path, sys.executable, "-m", "resilience_sdk", "run", "--no-python", "true") as job:
        assert job.finish() == 2
        assert f"in use by job other (host {host_name()}, pid {os.getpid()})" in job.screen
        assert len(job.decisions()) == 1


def test_the_lease_of_a_lost_node_is_waited_for(tmp_path):
    """A launcher that was refused for it is run again when it has ended; that is no retry."""
    run = RunDirectory.create(tmp_path / "run")
    lease_of(run, host="lost-node")
    seen = f"{STALE_AFTER_S - 3.0} seconds ago"  # when the first run ends, however long it took to start
    command = shell(f'[ "$n" = 1 ] || exit 0; touch -d "{seen}" "$RESILIENCE_RUN_DIR/lease.json"; exit 2')
    with supervised(tmp_path, *command, options=("--max-job-retries", "0")) as job:
        assert job.finish() == 0, job.screen
        assert job.runs() == 2
        assert "held by job other on lost-node" in job.screen
        assert time.time() >= run.lease.stat().st_mtime + STALE_AFTER_S


def test_a_signal_ends_the_wait_for_a_lease(tmp_path):
    """Nobody runs who could be asked to leave."""
    lease_of(RunDirectory.create(tmp_path / "run"), host="lost-node")
    with supervised(tmp_path, *shell("exit 2")) as job:
        job.wait(lambda: "waiting" in job.screen, "the wait")
        job.process.terminate()
        assert job.finish() == 75
        assert job.runs() == 1


def test_a_command_is_told_which_nodes_to_leave_out(tmp_path: Path) -> None:
    """By the history beside its run; it is said, and what the user has named himself stays."""
    needed.library("sqlalchemy", "history")
    for number in (1, 2):
        run = ToldFleetRun.make(tmp_path / f"old{number}", ["n1", "n2"], at=time.time() - 86400 * number)
        run.start()
        run.at += 3600
        run.fail("n2", "gpu_fell_off_bus", "hardware", action="exclude_node")
        run.end()
    index = Index(str(tmp_path / "history.db"))
    index.add([tmp_path])
    index.close()
    command = ("bash", "-c", 'echo "$RESILIENCE_EXCLUDE_NODES" > "$TOLD/left-out"')
    for folder, env, told in (("run", {}, "n2"), ("again", {"RESILIENCE_EXCLUDE_NODES": "n7"}, "n7")):
        place = tmp_path / folder
        place.mkdir()
        with supervised(place, *command, env={**env, "RESILIENCE_DB": str(tmp_path / "history.db")}) as job:
            assert job.finish() == 0, job.screen
            assert (job.told / "left-out").read_text() == f"{told}\n"
            assert "n2: suspect: 2 independent failures in 2 runs" in " ".join(job.screen.split())
