"""`resilience run` and `supervise` as the first process of a PID namespace, as in a container."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import psutil
import pytest

PROJECT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
_UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_RUN = (sys.executable, "-m", "resilience_sdk", "run", "supervised_in_container.py")
_SUPERVISE = (sys.executable, "-m", "resilience_sdk", "supervise", "--retry-delay", "0", "--")


def _why_not() -> str | None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root may make a PID namespace"
    if shutil.which("unshare") is None:
        return "there is no unshare"
    done = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, timeout=30)
    return None if done.returncode == 0 else f"no PID namespace can be made: {done.stderr.strip()}"


_REASON = _why_not()
pytestmark = [
    pytest.mark.slow,  # containers are made for them
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
]


@attrs.define
class Container:
    """A command that is PID 1 of its namespace. `process` is the one outside that waits for it."""

    process: subprocess.Popen[bytes]
    told: Path
    log: Path

    def first(self) -> psutil.Process:
        """Return PID 1 of the namespace, as it is seen from outside."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def wait_for(self, name: str) -> str:
        deadline = time.monotonic() + 60
        while not (self.told / name).exists():
            assert time.monotonic() < deadline, f"{name} did not come:\n{self.log.read_text()}"
            assert self.process.poll() is None, f"it ended before {name} came:\n{self.log.read_text()}"
            time.sleep(0.02)
        return (self.told / name).read_text()

    def finish(self) -> int:
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.log.read_text()}") from None


@pytest.fixture
def container(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Container]:
    """The command of the test's parameter, as PID 1."""
    told, pages, log = tmp_path / "told", tmp_path / "pages", tmp_path / "log"
    told.mkdir()
    pages.mkdir()
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    own |= {"PYTHONPATH": str(PROJECT), "TOLD": str(told), "RESILIENCE_PAGE_DIR": str(pages)}
    own["RESILIENCE_RUN_DIR"] = str(tmp_path / "run")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*_UNSHARE, *request.param], cwd=SCRIPTS, env=own, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield Container(process, told, log)
    finally:
        process.kill()  # the kernel then kills PID 1, and with it the whole namespace
        process.wait()


@pytest.mark.parametrize("container", [(*_RUN, "orphan")], indirect=True)
def test_orphans_are_reaped(container: Container) -> None:
    """A process whose parents are gone is collected while the job runs, and the job ends as elsewhere."""
    assert container.finish() == 0, container.log.read_text()
    assert int((container.told / "reaped").read_text().split()[0]) > 1


@pytest.mark.parametrize(
    "container",
    [
        pytest.param((*_RUN, "wait"), id="run"),
        pytest.param((*_SUPERVISE, *_RUN, "wait"), id="supervise"),
    ],
    indirect=True,
)
def test_sigterm_reaches_the_ranks(container: Container) -> None:
    """What a container's stop sends to PID 1 comes to the rank, which saves; the exit code says: requeue."""
    container.wait_for("up")
    container.first().send_signal(signal.SIGTERM)
    assert container.finish() == 75, container.log.read_text()
    assert (container.told / "heard").exists()


def test_ctrl_c_at_a_terminal_comes_once(tmp_path: Path) -> None:
    """With a terminal the foreground is the launcher's, so that one Ctrl-C is one request and not two."""
    counter = 'trap "echo heard >> heard; sleep 0.3; exit 130" INT; touch up; while :; do sleep 0.05; done'
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [*_UNSHARE, *_SUPERVISE, "sh", "-c", counter],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "RESILIENCE_RUN_DIR": str(tmp_path / "run")},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        os.close(theirs)
        terminal = Container(process, tmp_path, tmp_path / "none")
        deadline = time.monotonic() + 60
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.write(ours, b"\x03")
        assert terminal.finish() == 130
        assert (tmp_path / "heard").read_text().split() == ["heard"]
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize("container", [(*_SUPERVISE, "sh", "-c", "kill -9 $$")], indirect=True)
def test_an_end_by_a_signal_has_an_exit_code(container: Container) -> None:
    """Also there the budget of retries is spent, and told."""
    assert container.finish() == 1
    assert "it was killed by SIGKILL" in container.log.read_text()
