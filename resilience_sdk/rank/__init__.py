"""Rank: one rank's side, which starts at the first use and lasts to the end of the process.

In come the calls of a script and of adapters; out go a page, a journal, checkpoints and a clean end. `lifecycle`
decides when recording begins and ends, `identity` which rank of which job this is; `session` holds what there is then,
`degraded` what there is without a page or without checkpoints, `helper_thread` does what a hung thread cannot.
`run` is `start_run` and `@resilient`, on top of `checkpoints`, `data` (the place in it) and `preemption` (the session's
part in the agreed stop). `exceptions` keeps the one that ends a rank, `all_ranks` what all of them do together,
`optimizer_hook` sees steps that nobody tells.
"""

from resilience_sdk.rank.lifecycle import (
    await_watch,
    bootstrap_worker,
    current,
    ensure_started,
    keep_output,
    leave_with,
    note_early_signal,
    record_exception,
    start_recording,
)
from resilience_sdk.rank.session import Session

__all__ = [
    "Session",
    "await_watch",
    "bootstrap_worker",
    "current",
    "ensure_started",
    "keep_output",
    "leave_with",
    "note_early_signal",
    "record_exception",
    "start_recording",
]
