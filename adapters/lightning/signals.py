"""Lightning's signal handlers, and how ours take their place.

Lightning installs a handler of SIGTERM when a training starts, which calls a collective inside the handler. The rank
that got the signal waits there for the others, and they wait for it in their backward: with more than one rank most
runs never end. So ours replaces it, before the first step; what was there before Lightning is chained as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilience_sdk.preemption import rank as listening


def replace_handlers(trainer: Any, also: Sequence[int] = ()) -> None:
    """Listen for the signals to leave in the place of Lightning, which puts back what was there before at the teardown.

    `also`: numbers of signals to leave beside those of the settings. For `on_train_start`, after Lightning has
    installed its own. Where the fit runs in a thread it has none.
    """
    connector = getattr(trainer, "_signal_connector", None)
    listening.take_over(dict(getattr(connector, "_original_handlers", None) or {}), also)


def let_ranks_leave(trainer: Any) -> None:
    """Let all ranks leave with their exit code, as they agreed to.

    Where Lightning has started the ranks itself, a thread of rank 0 looks for one that has ended with another code than
    0, and kills all that are left. It looks into this list.
    """
    processes = getattr(getattr(trainer.strategy, "launcher", None), "procs", None)
    if isinstance(processes, list):
        processes.clear()
