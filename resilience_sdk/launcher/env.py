"""The environment of ranks: what the launcher adds to it, on top of what torchrun sets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs

from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.json_records import to_text
from resilience_sdk.core.settings.fields import SECRET_FIELDS, SINK_FIELDS
from resilience_sdk.core.settings.nvrx import provided_directory
from resilience_sdk.system.hostinfo import host_name, process_start_ticks

if TYPE_CHECKING:
    from resilience_sdk.launcher.options import Options

# Without it, the store that elastic hands to the ranks outlives the attempt, and the next one reads the dead
# ranks' addresses from it.
_NOT_FOR_RANKS = SECRET_FIELDS | {*SINK_FIELDS}  # addresses of sinks may hold passwords too; no rank asks for them
_LONGEST_VARIABLE = 100_000  # the kernel refuses a program with one of 128 KiB
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def prepare_launcher() -> None:
    """Set what torch reads in this process; take out what an outer launcher said to *its* ranks."""
    env = environ.environment()
    env.setdefault(_OWN_STORE, "1")
    if environ.INTERNAL_JOB in env:
        # Inside a rank of another run: its directory is that run's, not what the user named for this one.
        env.pop(environ.RUN_DIR, None)
    if environ.INTERNAL_NVRX in env:
        env.pop(environ.NVRX_MONITOR, None)
    for name in [name for name in env if name.startswith(environ.INTERNAL_PREFIX)]:
        del env[name]


def provide_nvrx(section: Mapping[str, Any]) -> None:
    """Let the ranks import the SDK as NVIDIA's extension, configured with `section`, and find its launcher.

    Raises ConfigError where the extension itself is installed: which of the two is meant must not depend on a path.
    """
    env = environ.environment()
    place = provided_directory("--provide-nvrx")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(place), env.get("PYTHONPATH"))))
    env["PATH"] = os.pathsep.join(filter(None, (str(place / "bin"), env.get("PATH"))))
    env[environ.INTERNAL_NVRX] = json.dumps(section, default=str)
    env[environ.NVRX_MONITOR] = str(place)  # scripts ask whether there is one; no client of ours opens it


def tell_signals(options: Options) -> None:
    """Tell the ranks which signals their launcher handles, as torchrun does where it has an option for them."""
    if hasattr(options.elastic, "signals_to_handle"):
        environ.environment()["TORCHELASTIC_SIGNALS_TO_HANDLE"] = options.elastic_signals


def launcher_key() -> str:
    """Return what names this launcher process and no other, on any host: pid, start and host."""
    pid = os.getpid()
    return f"{pid}-{process_start_ticks(pid) or 0}-{host_name()}"


def job_key(env: Mapping[str, str], rendezvous_id: str | None, endpoint: str) -> str:
    """Return the job key: the user's or scheduler's, else the rendezvous' (all nodes have it), else our own."""
    fallback = f"elastic-{rendezvous_id}-{endpoint}" if rendezvous_id else f"launcher-{launcher_key()}"
    # A launcher inside a rank of another job is a job of its own.
    return environ.job_key({k: v for k, v in env.items() if k != "TORCHELASTIC_RUN_ID"}, fallback)


def job_variables(
    *,
    job: str,
    run_dir: Path,
    named: bool,
    pages: Path | None,
    settings_file: Path | None,
    config: JobConfig | None = None,
) -> dict[str, str]:
    """Return the variables that are equal for all ranks and attempts.

    `config` goes there as text, without secrets: a script may print its environment.
    """
    variables = {environ.RUN_DIR: str(run_dir), environ.INTERNAL_JOB: job}
    variables[environ.INTERNAL_RUN_NAMED] = "1" if named else "0"
    variables[environ.INTERNAL_PAGES] = "" if pages is None else str(pages)
    if settings_file is not None:
        variables[environ.INTERNAL_SETTINGS] = str(settings_file)
    if config is not None:
        public = {name: None if name in _NOT_FOR_RANKS else value for name, value in config.settings.items()}
        text = to_text(attrs.evolve(config, settings=public))
        if len(text.encode()) < _LONGEST_VARIABLE:  # else the file has to do
            variables[environ.INTERNAL_CONFIG] = text
    return variables


class RankLogs(LogsSpecs):
    """The user's log specification, which also carries our variables to the ranks.

    Elastic calls `reify` with the environment of every rank just before it starts them and expects it to be
    added to: this is the one place where all torch versions let a subclass do that.
    """

    def __init__(
        self, make: Callable[[], LogsSpecs], variables: Mapping[str, str], journal: Journal | None = None
    ) -> None:
        """Wrap what `make` returns, which makes the directory; `variables` go to every rank.

        Where there is no place for the files, which the `journal` is told, an attempt has none: what its ranks print
        reaches the screen. The next attempt tries again.
        """
        super().__init__()
        self._make = make
        self._inner: LogsSpecs | None = None
        self._variables = dict(variables)
        self._journal = journal
        self.attempt = 0
        self.own_store = True
        self.error_files: dict[int, str] = {}
        self.log_files: dict[int, tuple[str, ...]] = {}
        """What each local rank writes into, where the user asked for files (`--redirects`, `--tee`)."""

    @property
    def root_log_dir(self) -> str:
        """The directory that logs are written under."""
        return os.devnull if self._inner is None else str(self._inner.root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Add our variables for each local rank, then let the wrapped specification choose the files."""
        for env in envs.values():
            env.update(self._variables)
            env[environ.INTERNAL_ATTEMPT] = str(self.attempt)
            if self.own_store:
                env["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        destination: Any = self._destination(envs)
        self.error_files = dict(destination.error_files)
        self.log_files = {
            rank: tuple(
                dict.fromkeys(filter(os.path.isabs, (by_rank.get(rank, "") for by_rank in _files(destination))))
            )
            for rank in envs
        }
        return destination

    def _destination(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        try:
            self._inner = self._inner or self._make()
            return self._inner.reify(envs)
        except OSError as error:
            place = error.filename or self.root_log_dir
            why = f"{place}: {error.strerror or error}"
            said = say_once(
                "logs", f"no logs of the ranks can be written ({why}): what they print is on the screen alone"
            )
            if said and self._journal is not None:
                self._journal.emit(Event.DEGRADED, what="logs", why=why)
            return DefaultLogsSpecs(log_dir=os.devnull).reify(envs)


def _files(destination: Any) -> tuple[dict[int, str], ...]:
    """Return the files by local rank: errors first, because they say more."""
    return destination.stderrs, destination.tee_stderrs, destination.stdouts, destination.tee_stdouts
