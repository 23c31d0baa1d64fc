"""The programs of the SDK: a table of all of them, and the one way in which they are started and ended.

A process that the SDK starts can rely on nothing that found the package for this one: the working directory may be
elsewhere, `-S` loads no `.pth` file and so no import hook of an editable installation, and `sys.path` may have been
changed in code. So each is told where the package was loaded from (`begin.py`), and where this process finds the rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING

import attrs

from resilience_sdk.system import installation

if TYPE_CHECKING:
    import subprocess

_BEGIN = os.path.join(installation.PACKAGE, "begin.py")


GAVE_UP = 78  # as sysexits.h has it for a wrong configuration
"""The exit code of a program that would end alike if it were started again, and has said why."""


@attrs.frozen
class Program:
    """What a process of the SDK runs, and what it finds around it."""

    code: str
    """Python that finds `os` and `sys` imported, arguments in `sys.argv[1:]`, and this copy of the package loaded."""
    isolated: bool = False
    """Nothing of the user's environment and site runs in it, which also halves the time of its start."""
    libraries: tuple[str, ...] | None = None
    """The modules of others that it imports; None: whatever this process can import."""
    runs_script: bool = False
    """The user's script runs in it in the end, and is to find a `sys.path` without anything of ours: in `path`."""


MONITOR = Program(
    "from resilience_sdk.monitor.main import main; sys.exit(main(sys.argv[1]))",
    isolated=True,
    libraries=("attr", "attrs", "structlog"),
)
EXPORTER = Program("from resilience_sdk.telemetry.__main__ import main; os._exit(main(['--from-launcher']))")
WATCH = Program("from resilience_sdk.health.watch import main; main()")
PROBE = Program("from resilience_sdk.health.probe_main import main; main()", isolated=True)
PREFLIGHT = Program("from resilience_sdk.health.checkup import main; sys.exit(main())")
NODE_LOOK = Program("from resilience_sdk.health.node_look import main; sys.exit(main())")
PAIRWISE_PREFLIGHT = Program("from resilience_sdk.health.pairwise import main; sys.exit(main())")
PLACE_PROBE = Program(
    "from resilience_sdk.system.place_probe import main; sys.exit(main(sys.argv[1]))", isolated=True, libraries=()
)
RESUMER = Program(
    "from resilience_sdk.system.linux import resume; resume(float(sys.argv[1]), int(sys.argv[2]))",
    isolated=True,
    libraries=(),
)
COMMAND = Program("from resilience_sdk.cli.main import main; sys.exit(main())")
SUMMARY = Program("from resilience_sdk.report.closing import main; sys.exit(main(sys.argv[1]))")
FORK_SERVER = Program(
    "from resilience_sdk.launcher.forkserver_main import serve; sys.path[:] = path; serve(sys.argv[1:])",
    runs_script=True,
)
WORKER = Program(
    "from resilience_sdk.launcher.worker import run; sys.path[:] = path; run(sys.argv[1:])",
    runs_script=True,
)


def command(program: Program, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command line that starts a program in any directory and environment; `python` is the interpreter."""
    flags = ("-I", "-S") if program.isolated else ("-u",) if program.runs_script else ()
    if program.runs_script:
        path = [installation.ROOT]  # what we need may lie beside us, and nowhere else on the path
    elif program.libraries is None:
        path = installation.import_path()
    else:
        path = installation.places_of(program.libraries)
    return [python or sys.executable, *flags, _BEGIN, program.code, str(len(path)), *path, *arguments]


def start(
    program: Program,
    *arguments: str,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    task: bytes | None = None,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    own_session: bool = True,
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program, by default in a session of its own: a Ctrl-C in the terminal is not meant for it.

    `cwd` is its working directory, else that of this process. `task` is what it finds on its standard input. Raises
    OSError where it cannot be started.
    """
    import subprocess  # the monitor, which starts nothing as a rule, does without it

    with contextlib.ExitStack() as files:
        if task is not None:
            file = files.enter_context(_unnamed_file())
            file.write(task)
            file.seek(0)
            stdin = file.fileno()
        return subprocess.Popen(
            command(program, *arguments, python=python),
            env=None if env is None else dict(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=own_session,
            cwd=cwd,
        )


def kill(process: subprocess.Popen[bytes], collect_s: float) -> bool:
    """Kill a program that leads a session, with all that it has started; tell whether it was gone `collect_s` later.

    One that is stuck in the kernel is left alone.
    """
    from subprocess import TimeoutExpired

    with contextlib.suppress(OSError):
        if process.returncode is None:  # once it was collected, its number may be another's
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutExpired):
        process.wait(max(0.0, collect_s))
    return process.returncode is not None


def end(process: subprocess.Popen[bytes], goodbye_s: float) -> None:
    """End a command that is still there: politely, so that it can take its own along, then not.

    Also of no session of its own. What a killed launcher has started does not outlive it.
    """
    from subprocess import TimeoutExpired

    for ask in (process.terminate, process.kill):
        if process.poll() is not None:
            return
        ask()
        with contextlib.suppress(TimeoutExpired):
            process.wait(goodbye_s)


def _unnamed_file() -> IO[bytes]:
    """Return a file without a name. No pipe: one that is stuck before it reads would hold up whoever writes."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("task"), "w+b")
    return tempfile.TemporaryFile()  # not Linux, or a Python that was built against an old C library
