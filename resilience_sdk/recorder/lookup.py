"""The block of a name.

Found at each use, recorded from the first use on, and replaced by a block without effect where nothing records.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import resilience_sdk
from resilience_sdk.recorder.blocks import Beat, Block
from resilience_sdk.recorder.recorder import Recorder

F = TypeVar("F", bound=Callable[..., Any])
B = TypeVar("B", bound=Block)


HEARTBEAT = "heartbeat"


class TimedBlock(Protocol):
    """What `heartbeat()` and `section()` give: a context manager, and a decorator of functions and coroutine functions.

    One type and not three, since a type checker takes what a union of decorators returns for unknown.
    """

    def __enter__(self) -> TimedBlock: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def __call__(self, function: F, /) -> F:
        """Decorate a function."""
        ...


class NoBlock:
    """What every call returns where nothing is recorded: a block that does nothing, and decorates to nothing."""

    __slots__ = ("kind", "timeout")

    def __init__(self) -> None:
        self.kind: str | None = None
        self.timeout: float | None = None

    def __enter__(self) -> NoBlock:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __call__(self, function: F) -> F:
        """Return the function itself."""
        _refuse_generators(function)
        return function

    def at_step(self, step: int) -> NoBlock:
        """Accept a step number."""
        return self


NO_BLOCK = NoBlock()


class Unstarted:
    """A block of a process that records nothing yet. Entering it starts the recording, decorating does not.

    A decorator runs at import, which happens in processes that are no ranks (spawned DataLoader workers), so
    it must not open a page.
    """

    __slots__ = ("_name", "_opened", "_step", "kind", "timeout")

    def __init__(self, name: str, kind: str = HEARTBEAT, timeout: float | None = None, step: int | None = None) -> None:
        """Be the heartbeat or section of a name, of a heartbeat in a global step."""
        self._name = name
        self._step = step
        self._opened: AnyBlock = NO_BLOCK
        self.kind = kind
        self.timeout = timeout

    def _find(self) -> Block | NoBlock:
        if self.kind != HEARTBEAT:
            return find_block(self._name, self.kind, self.timeout)
        beat = find_beat(self._name)
        return beat if self._step is None else beat.at_step(self._step)

    def __enter__(self) -> AnyBlock:
        self._opened = self._find()
        return self._opened.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function; each call looks its block up anew."""
        return decorate(function, self._find)

    def at_step(self, step: int) -> Unstarted:
        """Set the global step number of the entry."""
        return Unstarted(self._name, self.kind, self.timeout, step)


AnyBlock = Block | NoBlock | Unstarted

# The blocks of the recording process by name. Filled at the first entry, emptied by a fork and by `forget()`.
BLOCKS: dict[str, Block | NoBlock] = {}
BEATS: dict[str, Beat | NoBlock] = {}
TELLERS: dict[str, Any] = {}  # what else a process makes of its recorder once, by what it is for
_MAX_CACHED = 1024  # names that vary (`f"save-{step}"`) must cost no memory


def _nobody() -> Recorder | None:
    return None


_starter: Callable[[], Recorder | None] = resilience_sdk._start_recording


def set_starter(starter: Callable[[], Recorder | None]) -> None:
    """Tell how recording begins: `starter()` returns the process's recorder, or None where there is none."""
    global _starter
    _starter = starter


def starter() -> Callable[[], Recorder | None]:
    """Return what `set_starter` was given last."""
    return _starter


def recorder() -> Recorder | None:
    """Return the recorder of this process, starting it if need be."""
    return _starter()


def find_beat(name: str) -> Beat | NoBlock:
    """Return the heartbeat of a name, starting the recording at first use."""
    beat = BEATS.get(name)
    if beat is None:
        current = _starter()
        beat = _keep(BEATS, name, current, None if current is None else current.beat(name))
    return beat


def find_block(name: str, kind: str, timeout: float | None) -> Block | NoBlock:
    """Return the section of a name, starting the recording at first use."""
    block = BLOCKS.get(name)
    if block is None:
        current = _starter()
        block = _keep(BLOCKS, name, current, None if current is None else current.block(name, kind, timeout))
    return block


def _keep(known: dict[str, B | NoBlock], name: str, current: Recorder | None, made: B | None) -> B | NoBlock:
    """Return what was made for a name, or what does nothing; keep it unless it may be another the next time."""
    is_final = current is not None or _starter is _nobody
    if made is not None or (is_final and len(known) < _MAX_CACHED):
        known[name] = made or NO_BLOCK
    return made or NO_BLOCK


def find_own_block(name: str, kind: str) -> Block | None:
    """Return the section of a name on the calling thread's lane, for hooks to begin and end; None: nothing is recorded.

    Where the name is there already with another kind, it is that section.
    """
    try:
        block = BLOCKS[name]
        if block.lane.ident == get_ident():  # type: ignore[union-attr]
            return block  # type: ignore[return-value]
    except (KeyError, AttributeError):
        block = find_block(name, kind, None)
    return _own(block)


def find_own_beat(name: str) -> Beat | None:
    """Return the heartbeat of a name on the calling thread's lane, for hooks; None: nothing is recorded."""
    try:
        beat = BEATS[name]
        if beat.lane.ident == get_ident():  # type: ignore[union-attr]
            return beat  # type: ignore[return-value]
    except (KeyError, AttributeError):
        beat = find_beat(name)
    return _own(beat)


def _own(block: B | NoBlock) -> B | None:
    if isinstance(block, NoBlock):
        return None
    return block if block.lane.ident == get_ident() else block.lane.recorder.twin(block)


def forget() -> None:
    """Empty the caches: every name is looked up anew at its next use."""
    BLOCKS.clear()
    BEATS.clear()
    TELLERS.clear()


def disable() -> None:
    """Make every later lookup a no-op; what is open already is closed as usual."""
    set_starter(_nobody)
    forget()


def decorate(function: F, find: Callable[[], AbstractContextManager[object]]) -> F:
    """Return `function` inside a block; of a coroutine function the whole awaited duration is meant."""
    _refuse_generators(function)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            with find():
                return await function(*args, **kwargs)

        return cast(F, run_coroutine)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with find():
            return function(*args, **kwargs)

    return cast(F, run)


def _refuse_generators(function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!s} is a generator: its body runs while it is iterated, "
            "not while it is called. Use a `with` block inside it, or straggler.iterate() around it"
        )
