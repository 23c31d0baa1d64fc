"""Threads that a rank may be waiting for when it stands in a lock. Pure.

From outside a lock looks the same whoever is to release it. A thread of the program's or a library's that works on a
socket, a pipe, a child, or waits for a time may do so, and what waits for it has its patience. Threads that keep house
for themselves never do: torch's, ours, those that accept connections, those that write logs and draw bars.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from resilience_sdk.attribution.exceptions import is_our_frame
from resilience_sdk.hang.waits import On, Wait

_OUTSIDE = (On.SOCKET, On.PIPE, On.POLL, On.CHILD, On.FILE)
# A pool's future, a thread's join, a queue that somebody fills, another process's semaphore.
_WORKER_WAIT = re.compile(
    r"(/concurrent/futures/_base\.py:\S+ (result|exception|wait|as_completed)"
    r"|/multiprocessing/(pool|process|queues|connection|synchronize|managers|popen_\w+)\.py:\S+ \w+"
    r"|/s3transfer/futures\.py:\S+ \w+|-packages/ray/_private/worker\.py:\S+ \w+"
    r"|/threading\.py:\S+ (join|_wait_for_tstate_lock)|/queue\.py:\S+ (get|put|join)|/subprocess\.py:\S+ \w+"
    r"|/torch/utils/data/dataloader\.py:\S+ \w+)$"
)
# Those of them that a thread of the same process ends, and nobody else.
_THREAD_WAIT = re.compile(r"(/threading\.py:\S+ (join|_wait_for_tstate_lock)|/queue\.py:\S+ (get|put|join))$")
_INNERMOST = 4  # frames, within which a wait for a worker is called
# The frames of a thread's start, below which its owner stands.
_STARTS = re.compile(
    r"(/threading\.py:\S+ (_bootstrap|_bootstrap_inner|run|_context_run)"
    r"|/concurrent/futures/thread\.py:\S+ (_worker|run)|/multiprocessing/pool\.py:\S+ \w+"
    r"|<frozen \w+>:\S+ \S+)$"
)
_TORCHS = re.compile(r"/torch/(?!distributed/checkpoint/)")
# Whoever accepts connections, serves requests or waits for commands.
_SERVERS = re.compile(
    r"(/socketserver\.py:\S+ serve_forever|/socket\.py:\S+ accept|/asyncio/base_events\.py:\S+ serve_forever"
    r"|/multiprocessing/(managers|resource_sharer|forkserver)\.py:\S+ (serve_forever|accepter|_serve|main)"
    r"|/multiprocessing/connection\.py:\S+ accept|/grpc/_server\.py:\S+ \w+"
    r"|-packages/(uvicorn|hypercorn|gunicorn|waitress|werkzeug|cheroot|aiohttp/web\w*|tornado|zmq|ipykernel|IPython"
    r"|debugpy|pydevd|_pydevd_bundle|rpyc)[/.])"
)
# Whoever keeps logs, figures and bars: a library's name below which all of its threads are of that kind.
_HOUSEKEEPERS = re.compile(
    r"(?:/lib/python3[\d.t]*|-packages)/(logging/handlers|loguru|tqdm|rich|alive_progress|tensorboard|tensorboardX|wandb|mlflow|comet_ml|neptune"
    r"|clearml|aim|swanlab|trackio|dvclive|prometheus_client|opentelemetry|sentry_sdk|ddtrace|datadog|newrelic"
    r"|statsd|watchdog|codecarbon|gpustat|nvitop|nvidia_resiliency_ext)[/.]"
)


def waits_for_worker(frames: Sequence[str]) -> bool:
    """Tell whether a stack, innermost first, says by itself that it waits for a thread, a process or a queue."""
    return any(_WORKER_WAIT.search(frame) for frame in frames[:_INNERMOST])


def waits_for_thread(frames: Sequence[str]) -> bool:
    """Tell whether a stack, innermost first, says by itself that only a thread of the same process can end its wait."""
    return any(_THREAD_WAIT.search(frame) for frame in frames[:_INNERMOST])


def may_be_waited_for(frames: Sequence[str], waiter: Sequence[str]) -> bool:
    """Tell whether a thread with this stack, innermost first, does something that `waiter` may be waiting for.

    What keeps house is waited for only by a stack that stands in the same library: its end, or a full queue of its.
    """
    if not frames:
        return False
    owner = next((frame for frame in reversed(frames) if not _STARTS.search(frame)), frames[0])
    if is_our_frame(owner):
        return "/checkpoint/" in owner and any(is_our_frame(frame) and "/checkpoint/" in frame for frame in waiter)
    if _TORCHS.search(owner) or any(_SERVERS.search(frame) for frame in frames):
        return False
    keeper = next((found[1] for frame in frames if (found := _HOUSEKEEPERS.search(frame))), None)
    return keeper is None or any(f"/{keeper}" in frame for frame in waiter)


def innermost(frames: Sequence[str]) -> str:
    """Return the innermost frame that is not of the standard library, or else of all, as a sentence has it."""
    frame = next((frame for frame in frames if not _STANDARD.search(frame)), frames[0] if frames else "?")
    place, _, function = frame.rpartition(" ")
    return f"{place.rpartition('/')[2]} in {function}"


def counts(wait: Wait, frames: Sequence[str], horizon_ns: int) -> bool:
    """Tell whether a thread that may be waited for is in a wait that will end, or that may rightly take long.

    `horizon_ns`: ends that lie further ahead are too far, as those of a watchdog's timer. A loop of asyncio that polls
    for nothing but its own wake-ups is idle, unless it has a time of its own to wait for.
    """
    is_outside = wait.on in _OUTSIDE and not is_idle_loop(wait, frames)
    if is_outside or wait.end_ns is None:
        return is_outside or wait.on is On.SLEEP
    return wait.end_ns <= horizon_ns


def is_idle_loop(wait: Wait, frames: Sequence[str]) -> bool:
    """Tell whether a wait is that of a loop of asyncio for nobody else's descriptor."""
    return wait.polls_one and any(_RUNS_LOOP.search(frame) for frame in frames[:_INNERMOST])


_STANDARD = re.compile(r"/lib/python3[\d.t]*/(?!(site|dist)-packages/)|^<frozen ")
_RUNS_LOOP = re.compile(r"/asyncio/base_events\.py:\S+ _run_once$")
