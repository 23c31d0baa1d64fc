"""What a session gives to the preemption, with a page and without one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from resilience_sdk import environ
from resilience_sdk.preemption import rank as preemption
from resilience_sdk.preemption.cell import make_link, read_link
from resilience_sdk.preemption.side import MONITOR, NO_PAGES, RANKS, NoJournal, Side, coordinator_word
from resilience_sdk.rank_page import layout as at
from resilience_sdk.session.helper import HelperThread
from resilience_sdk.session.identity import find_identity, is_alone
from resilience_sdk.settings import Settings
from resilience_sdk.settings.parse import signal_number

_ELASTIC_GRACE_S = 30.0  # torchrun ends its ranks by SIGKILL so long after it has passed a signal on
_MONITOR_COMES_S = 10.0
_POLL_S = 0.005


def signal_numbers(settings: Settings) -> tuple[int, ...]:
    """Return the numbers of `preempt_signals`."""
    return tuple(signal_number(name) for name in settings.preempt_signals)


def signal_grace_s(env: Mapping[str, str]) -> float:
    """Return how long ranks live after a signal, as far as who sends it has a time of its own."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in env and environ.INTERNAL_JOB not in env
    return _ELASTIC_GRACE_S if is_torchrun else math.inf


def monitor_coordinates(
    pages: Path, attempt: int, env: Mapping[str, str], has_monitor: Callable[[], bool | None]
) -> bool:
    """Tell whether monitors coordinate the stop of this job, alike on all its ranks; the ranks themselves otherwise.

    Our launcher carries what the monitors of several nodes tell one another, others do not. On one node it depends on
    whether a monitor can be started: the first rank that knows decides for all of them, in the page directory. Waits
    some seconds for a monitor that is about to come. Any thread.

    Args:
        pages: The page directory of the job on this node.
        attempt: The number of the attempt.
        env: The environment of this rank.
        has_monitor: Tells whether there is one; None as long as it may still come.
    """
    if environ.has_several_nodes(env):
        return environ.INTERNAL_JOB in env
    word = coordinator_word(pages, attempt)
    deadline = time.monotonic() + _MONITOR_COMES_S
    try:
        while (decided := read_link(word)) is None:
            found = has_monitor()
            if found is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            make_link(word, MONITOR if found else RANKS)
    except OSError:
        return True
    return decided == MONITOR


def knows_no_monitor(pages: Path, attempt: int) -> bool:
    """Tell whether a rank of this node has found that none can be started. Any thread."""
    try:
        return read_link(coordinator_word(pages, attempt)) == RANKS
    except OSError:
        return False


def listen_without_page(settings: Settings, env: Mapping[str, str]) -> None:
    """Let `preemption.check()` work in a process that can have no page: the ranks then agree among themselves.

    In a job of our launcher with several nodes it cannot: on the other nodes monitors coordinate.
    """
    if environ.INTERNAL_JOB in env and environ.has_several_nodes(env):
        return
    identity = find_identity(env)
    run_dir = env.get(environ.RUN_DIR) or settings.run_dir
    preemption.listen(
        Side(
            words=memoryview(bytearray(8 * at.LANES_AT)).cast("Q"),
            pages=NO_PAGES,
            journal=NoJournal(),
            attempt=environ.attempt(env),
            signals=signal_numbers(settings),
            grace_s=settings.preempt_time,
            wakeup=_start_helper,
            signal_grace_s=signal_grace_s(env),
            request_file=Path(run_dir) / "preempt" if run_dir else None,
            began_unix=time.time(),
            is_alone=has_no_peers(identity.world_size, identity.provisional, env),
            has_coordinator=lambda: False,
        )
    )


def has_no_peers(world_size: int, provisional: bool, env: Mapping[str, str]) -> bool:
    """Tell whether a process is a job of its own, as far as can be known before there is a process group."""
    return is_alone(env) if provisional else world_size == 1


def signalled(numbers: bytes) -> None:
    """Take what the wakeup descriptor received, in the helper thread."""
    handlers = preemption.handlers()
    if handlers is not None:
        handlers.see(numbers)


def _start_helper() -> int:
    pid = os.getpid()

    def look() -> None:
        if os.getpid() == pid:
            preemption.look()

    helper = HelperThread(None, periodic=look, signalled=signalled)
    helper.start()
    return helper.descriptor
