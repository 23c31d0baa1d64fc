"""Finding the block of a name, starting the recording at first use, and what stands in where nothing is recorded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from types import TracebackType
from typing import Any, TypeVar, cast

import resilience_sdk
from resilience_sdk.lanes.blocks import Beat, Block
from resilience_sdk.lanes.recorder import Recorder

F = TypeVar("F", bound=Callable[..., Any])


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

    __slots__ = ("_find", "_opened", "kind", "timeout")

    def __init__(self, find: Callable[[], AnyBlock], kind: str | None = None, timeout: float | None = None) -> None:
        """`find` returns the block to use, and starts the recording if it has to."""
        self._find = find
        self._opened: AnyBlock = NO_BLOCK
        self.kind = kind
        self.timeout = timeout

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
        find = self._find
        return Unstarted(lambda: find().at_step(step))  # type: ignore[union-attr]


AnyBlock = Block | NoBlock | Unstarted

# The blocks of the recording process by name. Filled at the first entry, emptied by a fork and by `forget()`.
BLOCKS: dict[str, Block | NoBlock] = {}
BEATS: dict[str, Beat | NoBlock] = {}
TELLERS: dict[str, Any] = {}  # what else a process makes of its recorder once, by what it is for
_MOST_CACHED = 1024  # names that vary (`f"save-{step}"`) must cost no memory


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
        if current is None:
            if _starter is _nobody:
                BEATS[name] = NO_BLOCK
            return NO_BLOCK
        beat = current.beat(name) or NO_BLOCK
        if beat is not NO_BLOCK or len(BEATS) < _MOST_CACHED:
            BEATS[name] = beat
    return beat


def find_block(name: str, kind: str, timeout: float | None) -> Block | NoBlock:
    """Return the section of a name, starting the recording at first use."""
    block = BLOCKS.get(name)
    if block is None:
        current = _starter()
        if current is None:
            if _starter is _nobody:
                BLOCKS[name] = NO_BLOCK
            return NO_BLOCK
        block = current.block(name, kind, timeout) or NO_BLOCK
        if block is not NO_BLOCK or len(BLOCKS) < _MOST_CACHED:
            BLOCKS[name] = block
    return block


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
    if not isinstance(block, Block):
        return None
    return block if block.lane.ident == get_ident() else block.lane.recorder.twin(block)


def find_own_beat(name: str) -> Beat | None:
    """Return the heartbeat of a name on the calling thread's lane, for hooks to enter and leave; None: nothing is
    recorded.
    """
    try:
        beat = BEATS[name]
        if beat.lane.ident == get_ident():  # type: ignore[union-attr]
            return beat  # type: ignore[return-value]
    except (KeyError, AttributeError):
        beat = find_beat(name)
    if not isinstance(beat, Beat):
        return None
    return beat if beat.lane.ident == get_ident() else beat.lane.recorder.twin(beat)


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
