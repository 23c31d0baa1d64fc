"""The journal of one rank."""

from __future__ import annotations

from resilience_sdk import hostinfo
from resilience_sdk.journal import Journal
from resilience_sdk.run_directory import RunDirectory


def rank_journal(run_dir: RunDirectory, job: str, attempt: int, rank: int) -> Journal:
    """Return the journal of a rank in `run_dir`; opens nothing yet."""
    return Journal(
        run_dir.journal,
        writer=f"rank{rank}",
        host=hostinfo.host_name(),
        boot_id=hostinfo.boot_id(),
        job=job,
        attempt=attempt,
        rank=rank,
    )
