"""The outcome of a job under a launcher that is not ours: what its exit code hides, and how to go on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from resilience_sdk import environ, hostinfo
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.job_config import JobConfig
from resilience_sdk.journal import redact_argv
from resilience_sdk.monitor.exits import exit_code, is_clean
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.outcome import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, Verdict
from resilience_sdk.preemption.account import Account, completed_steps, lost_words
from resilience_sdk.run_directory import RunDirectory

_MOST_CHARACTERS = 4096
_THE_SAME = "<the same command>"


def verdict_of(
    final: Sequence[WatchedRank], stop: Account, *, left: bool, fault: str | None
) -> tuple[Verdict, int, str]:
    """Return verdict, exit code and reason of a job from the ranks of its last attempt.

    `stop` is what is known of a stop of that attempt; `left`: it was found to have ended by one; `fault`: what was
    found to have ended it otherwise, in words.
    """
    codes = [code for watched in final if (code := exit_code(watched)) is not None]
    clean = all(is_clean(watched) for watched in final)
    if (clean and stop.is_agreed) or EXIT_PREEMPTED in codes or left:
        return Verdict.PREEMPTED, EXIT_PREEMPTED, stop.reason()
    if clean:
        return Verdict.FINISHED, EXIT_FINISHED, "all ranks ended well"
    if any(code == -2 for code in codes):
        lost = lost_words(completed_steps(watched.snapshot for watched in final), stop.saved)
        return Verdict.INTERRUPTED, EXIT_INTERRUPTED, f"interrupted by the user; {lost}"
    return Verdict.GIVE_UP, EXIT_FAILED, fault or "a rank did not end well"


def saved_step(config: JobConfig) -> int | None:
    """Return the newest step that can be resumed from."""
    from resilience_sdk.checkpoint.newest import newest_checkpoint  # late: a megabyte, and only at the end of a job

    return newest_checkpoint(RunDirectory(Path(config.run_dir)))


def resume_command(config: JobConfig) -> str:
    """Return the command line that goes on in the same run directory, without secrets.

    The launcher's where that is a Python program, such as torchrun, and the rank's own where it was started by itself;
    what a shell or a scheduler ran cannot be read from its process. Call it while they live.
    """
    pid, ticks = config.parent_pid, config.parent_ticks
    if not pid:
        pid, ticks = config.creator_pid, config.creator_ticks
    words = _command_line(pid) if not hostinfo.process_is_gone(pid, ticks or None) else []
    is_python = bool(words) and os.path.basename(words[0]).startswith("python")
    shown = shlex.join(redact_argv(words)) if is_python else _THE_SAME
    if len(shown) > _MOST_CHARACTERS:
        shown = _THE_SAME
    return f"{environ.RUN_DIR}={shlex.quote(config.run_dir)} {shown}"


def _command_line(pid: int) -> list[str]:
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return data.decode(errors="replace").split("\0")[:-1]
