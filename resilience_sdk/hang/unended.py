"""Processes that do not end after their training, and what holds each of them. Pure.

Python ends a process in this order: it waits for threads that are no daemons, calls the functions of `atexit` (one of
multiprocessing's waits for children), takes the interpreter down, and leaves the rest to functions and destructors of
native code. Where a process stands in that order is told by the frames of its main thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk.attribution.exceptions import is_users_frame
from resilience_sdk.hang.notices import innermost_of_user

DESTROYING = "destroy_process_group"
_JOINS_THREADS = (" _shutdown", " _python_exit")  # of threading, and of concurrent.futures.thread
_JOINS_CHILDREN = ("/multiprocessing/util.py:",)
_WAITS_FOR_CHILD = ("/subprocess.py:", "/multiprocessing/popen_", "/multiprocessing/process.py:")
_MAX_NAMED = 3


@attrs.frozen
class HeldThread:
    """A thread that is no daemon, and its frames as `file:line function`, innermost first."""

    name: str
    frames: tuple[str, ...] = ()


@attrs.frozen
class Held:
    """What is seen of a process that does not end."""

    main: tuple[str, ...] = ()
    """The frames of its main thread, innermost first; none where Python is down, or nobody could see them."""
    threads: tuple[HeldThread, ...] = ()
    children: Mapping[int, str] = attrs.field(factory=dict)
    """Its children and their command lines."""
    is_known: bool = True
    """Whether the main thread was seen at all."""


def holder(held: Held) -> str:
    """Return who holds a process, as a clause that follows its name, and where."""
    main = held.main
    if any(frame.endswith(f" {DESTROYING}") for frame in main):
        outer = main[next(i for i, frame in enumerate(main) if frame.endswith(f" {DESTROYING}")) :]
        user = next(filter(is_users_frame, outer), None)
        return f"it is in {DESTROYING}, which waits for the other ranks{_at(user)}"
    if held.threads and (not main or any(frame.endswith(_JOINS_THREADS) for frame in main)):
        return _of_threads(held.threads)
    if any(frame.endswith(_JOINS_THREADS) for frame in main):
        return "a thread that is no daemon has not ended, and Python waits for it"
    if any(place in frame for frame in main for place in _JOINS_CHILDREN):
        return _of_children(held.children) or "an at-exit function of multiprocessing waits"
    if any(place in frame for frame in main for place in _WAITS_FOR_CHILD) and held.children:
        return _of_children(held.children) + _at(next(filter(is_users_frame, main), None))
    if main:
        own = innermost_of_user(main)
        kind = "an at-exit function" if own is not None and is_users_frame(own) else "what Python does at exit"
        return f"{kind} has not returned{_at(own)}"
    if held.threads:
        return _of_threads(held.threads)
    if children := _of_children(held.children):
        return f"{children}, or native code has not returned"
    if not held.is_known:
        return "what holds it could not be seen"
    return "Python has ended, and native code (at-exit functions, destructors, threads) has not returned"


def _of_threads(threads: Sequence[HeldThread]) -> str:
    named = [f"thread {one.name!r}{_at(innermost_of_user(one.frames))}" for one in threads[:_MAX_NAMED]]
    rest = f" and {len(threads) - _MAX_NAMED} more" if len(threads) > _MAX_NAMED else ""
    verb, are = ("has not ended", "is no daemon") if len(threads) == 1 else ("have not ended", "are no daemons")
    return f"its {', '.join(named)}{rest} {verb}; Python waits for it because it {are}".replace(
        "for it because it are", "for them because they are"
    )


def _of_children(children: Mapping[int, str]) -> str:
    if not children:
        return ""
    named = [f"process {pid} ({command})" for pid, command in list(children.items())[:_MAX_NAMED]]
    rest = f" and {len(children) - _MAX_NAMED} more" if len(children) > _MAX_NAMED else ""
    return f"it waits for its child{'ren' * (len(children) > 1)} {', '.join(named)}{rest}"


def _at(frame: str | None) -> str:
    if frame is None:
        return ""
    place, _, function = frame.rpartition(" ")
    return f" at {place.rpartition('/')[2]} in {function}"
