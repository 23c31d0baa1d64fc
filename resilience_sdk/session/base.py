"""`Session`: what a rank has of its job, whether anybody watches it or not."""

from __future__ import annotations

from resilience_sdk.job_config import JobConfig
from resilience_sdk.journal import Journal
from resilience_sdk.lanes import Recorder
from resilience_sdk.run_directory import RunDirectory
from resilience_sdk.session.identity import Identity, group_identity
from resilience_sdk.settings import Settings


class Session:
    """Who this rank is, where its job writes, and with which settings; made by `lifecycle` or `pageless`."""

    identity: Identity
    attempt: int
    config: JobConfig
    settings: Settings
    run_dir: RunDirectory
    journal: Journal
    may_resume: bool
    """Whether what is in the run directory is this job's to go on from."""
    recorder: Recorder | None = None
    """None where nothing is timed or guarded."""
    pages_key: str | None = None
    """Equal for ranks whose pages one monitor reads; None for a rank without a page."""

    def settle(self) -> bool:
        """Correct a provisional identity once a process group is there; tell whether it is final now."""
        if not self.identity.provisional:
            return True
        found = group_identity()
        if found is None:
            return False
        local_rank = self.identity.local_rank if self.identity.world_size > 1 else found.local_rank
        self.identity = Identity(found.rank, local_rank, found.world_size, provisional=False)
        self.journal.rank = found.rank
        return True
