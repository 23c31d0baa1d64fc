"""`start_run`: the run of this process, and which of its options still count in a job that runs already."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.console import say_once
from resilience_sdk.errors import ConfigError
from resilience_sdk.session.base import Session
from resilience_sdk.session.job import refuse_fresh_start
from resilience_sdk.session.lifecycle import ensure_started
from resilience_sdk.session.pageless import pageless_session
from resilience_sdk.session.run import Run
from resilience_sdk.settings import Settings, load_settings, override_settings

# Read by nobody but the rank itself, so `start_run` may still set them in a job that runs already.
_OPTIONS_OF_STEPS = frozenset({"epochs", "max_steps", "on_preempt"})
_OPTIONS_OF_THE_RANK = frozenset({"checkpoint_every", "checkpoint_keep", "checkpoint_async"})


def start_run(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    **overrides: Any,
) -> Run:
    """Return the run of this process, to be entered with `with`.

    Args:
        run_dir: Where everything is written; without it the setting, the scheduler's job, or a new directory.
        state: What a checkpoint holds, by name (see `Checkpointer`); None = nothing is saved.
        settings: All options; without it those of the launcher and the environment.
        **overrides: Single options by field name, such as `checkpoint_every="10min"`.

    Raises:
        ConfigError: An option or an entry of `state` is wrong; the message names it and the cure.
        RunDirectoryError: `run_dir` cannot be used.
        DirectoryInUseError: Another job uses it; with `state`, also where a setting or `RESILIENCE_RUN_DIR` names it.
            Not under a foreign launcher, where `<name>.2` is used and that is said.

    Example:
        with start_run("runs/a", state={"model": model, "optimizer": optimizer}) as run:
            for step, batch in run.steps(loader, epochs=3):
                train_step(batch)
    """
    for name in _OPTIONS_OF_STEPS & overrides.keys():
        raise ConfigError(
            f"start_run({name}={overrides[name]!r}): {name} is an option of the loop: run.steps({name}=...)"
        )
    session = begin_session("start_run", run_dir, settings, overrides, resumes=state is not None)
    return Run(session, state)


def begin_session(
    caller: str,
    run_dir: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    resumes: bool = True,
) -> Session | None:
    """Return the session of this process with these options, as far as they still count; None: nothing is recorded.

    `caller` is what the user has called, for what is said; `resumes`: a directory beside one in use will not do. Raises
    as `start_run`.
    """
    overrides = overrides or {}
    if settings is not None and overrides:
        settings = override_settings(settings, overrides)
    elif overrides:
        # Checked even where a session is already running and cannot take them any more.
        load_settings(arguments=overrides, strict_env=False)
    named = None if run_dir is None else os.fspath(run_dir)
    session: Session | None = ensure_started(named, settings, overrides or None, resumes=resumes)
    if session is None:
        session = pageless_session(named, settings, overrides or None, resumes=resumes)
    if session is not None and (resumes or named is not None):
        refuse_fresh_start(session.config)
    if session is not None and run_dir is not None and session.run_dir.path != Path(os.path.abspath(run_dir)):
        say_once("run_dir", f"{caller}({os.fspath(run_dir)!r}): this job writes to {session.run_dir.path} already")
    if session is not None:
        _take_options(caller, session, settings, overrides)
    return session


def _take_options(caller: str, session: Session, settings: Settings | None, overrides: Mapping[str, Any]) -> None:
    """Let the options of the code count in a session that the launcher started before the script.

    What only this rank reads can change now; what the job's monitor reads was settled by who started the job.
    """
    standing = session.settings
    wanted = override_settings(standing, overrides) if settings is None else settings
    named = set(overrides) if settings is None else wanted.explicit
    changed = {name for name in named if getattr(wanted, name) != getattr(standing, name)}
    session.settings = attrs.evolve(
        standing, **{name: getattr(wanted, name) for name in changed & _OPTIONS_OF_THE_RANK}
    )
    late = sorted(changed - _OPTIONS_OF_THE_RANK - {"run_dir"})
    if late and session.identity.rank == 0:
        options = " ".join(f"--{name.replace('_', '-')}" for name in late)
        say_once("late options", f"{caller}({late[0]}=...) is too late, the job runs: launch it with {options}")
