"""Sessions that have less: no place for a page, or no checkpoints. They save, resume and stop as others do.

Its job agrees on nothing in a page directory, so where there are other ranks the run directory must have a name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from resilience_sdk.checkpoint import GoodCheckpoint
from resilience_sdk.checkpoint.last_save import End
from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import DirectoryInUseError, ResilienceError, RunDirectoryError
from resilience_sdk.rank.identity import fallback_job_key, find_identity, propose, rank_journal
from resilience_sdk.rank.lifecycle import effective_settings, lacks_page
from resilience_sdk.rank.preemption import has_no_peers
from resilience_sdk.rank.session import Session, script_name

_session: PagelessSession | None = None
_made_by: int | None = None


class _NamelessError(RunDirectoryError):
    """Each rank would make up a run directory of its own."""


class PagelessSession(Session):
    """See the module."""

    def __init__(self, settings: Settings, env: Mapping[str, str], run_dir: str | None, *, resumes: bool) -> None:
        """Open the run directory. Raises OSError and ResilienceError."""
        self.identity = identity = find_identity(env)
        self.attempt = environ.attempt(env)
        self.settings = settings
        job = environ.job_key(env, fallback_job_key(env))
        self.config = propose(job, script_name(), settings, env, run_dir, resumes)
        is_new = not self.config.run_named
        if is_new and not has_no_peers(identity.world_size, identity.provisional, env):
            raise _NamelessError(
                f"ranks without pages cannot agree on a new run directory: name one with {environ.RUN_DIR}"
            )
        self.run_dir = RunDirectory.create(self.config.run_dir, group_readable=settings.group_readable)
        self.journal = rank_journal(self.run_dir, job, self.attempt, identity.rank)
        # Our launcher hands on a name that nobody has given, too.
        is_made_up = run_dir is None and env.get(environ.INTERNAL_RUN_NAMED) == "0"
        self.may_resume = (self.config.run_named and not is_made_up) or self.attempt > 0


def pageless_session(
    run_dir: str | None, settings: Settings | None, arguments: Mapping[str, Any] | None, *, resumes: bool
) -> Session | None:
    """Return the session of a rank that has no page, the same at each call; None for all others.

    None too where the run directory cannot be used, which is said. Raises as `ensure_started`.
    """
    global _session, _made_by
    if not lacks_page():
        return None
    if _session is not None and _made_by == os.getpid():
        return _session
    env = environ.environment()
    if arguments or settings is None:
        settings = effective_settings(env, arguments)
    try:
        _session, _made_by = PagelessSession(settings, env, run_dir, resumes=resumes), os.getpid()
    except (OSError, ResilienceError) as error:
        is_codes = run_dir is not None and isinstance(error, RunDirectoryError)
        if is_codes or (resumes and isinstance(error, DirectoryInUseError)):
            raise
        # The other reasons are those for which the start has failed before.
        say_once(
            "pageless" if isinstance(error, _NamelessError) else "start", f"nothing is written in this process: {error}"
        )
        return None
    return _session


class NoCheckpointer:
    """Stands in where nothing is saved: a run without `state`, or an SDK that is switched off."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.last_good: GoodCheckpoint | None = None
        self.skipped_steps: frozenset[int] = frozenset()
        self.unsaved: None = None

    def resume(self) -> int:
        """Return 0: there is nothing to resume."""
        return 0

    def holds(self, step: int) -> bool:
        """Hold nothing back."""
        return False

    def save(self, step: int, *, anew: bool = False) -> bool:
        """Return False: nothing is saved."""
        return False

    def save_patiently(self, step: int, *, anew: bool = False) -> End:
        """Wait for nothing: nothing is lost that was to be saved."""
        self.save(step, anew=anew)
        return End(None)

    def maybe_save(self, step: int) -> bool:
        """Return False: nothing is saved."""
        return False
