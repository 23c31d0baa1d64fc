"""`section()` and `iterate()`: timed parts of a step, guarded by deadlines of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from resilience_sdk import lanes
from resilience_sdk.errors import ConfigError
from resilience_sdk.lanes import BLOCKS, Block, NoBlock, Unstarted

if TYPE_CHECKING:
    from resilience_sdk.straggler.gpu_sections import GpuSection

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

KINDS = ("compute", "comm", "io", "idle")


@overload
def section(name: F, /) -> F: ...
@overload
def section(
    name: str, *, kind: str = "compute", timeout: float | None = None, gpu: Literal[False] = False
) -> Block | NoBlock | Unstarted: ...
@overload
def section(name: str, *, kind: str = "compute", timeout: float | None = None, gpu: Literal[True]) -> GpuSection: ...
def section(name: Any, *, kind: str = "compute", timeout: float | None = None, gpu: bool = False) -> Any:
    """Time a part of the step: `with section("fwd"):`, or `@section("fwd")` on a function.

    `kind` says what the time is spent on: `compute`, `comm`, `io` or `idle`. `timeout` is the deadline of one
    pass in seconds; None means one that is learned. Costs about a microsecond, never blocks; safe in threads,
    coroutines (timed, not guarded) and forked children (where it does nothing).

    On a GPU the wall time is that of launching the work. `gpu=True` records two events around it, which costs some
    microseconds, and beside the wall time collects what the GPU took, without waiting for it.

    Raises ConfigError for an unknown kind, a timeout that is not above zero, and a name that is no string.
    """
    if gpu:
        return _on_gpu(name, kind, timeout)
    try:
        block = BLOCKS[name]
    except (KeyError, TypeError):
        return _first(name, kind, timeout)
    if timeout != block.timeout and isinstance(block, Block):
        _check(name, kind, timeout)
        block.lane.recorder.retime(block, timeout)
    return block


def _on_gpu(name: Any, kind: str, timeout: float | None) -> GpuSection:
    from resilience_sdk.straggler.gpu_sections import GpuSection

    _check(name, kind, timeout)
    return GpuSection(name, lambda: section(name, kind=kind, timeout=timeout))


def _first(name: Any, kind: str, timeout: float | None) -> Any:
    if callable(name):  # @section without parentheses: the function names the section
        own_name = name.__name__
        return lanes.decorate(name, lambda: lanes.find_block(own_name, kind, timeout))
    _check(name, kind, timeout)
    return Unstarted(lambda: lanes.find_block(name, kind, timeout), kind, timeout)


def _check(name: Any, kind: str, timeout: float | None) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"section(name) takes a string, got {name!r}")
    if kind not in KINDS:
        raise ConfigError(f"section({name!r}, kind={kind!r}): kind is one of {', '.join(KINDS)}")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise ConfigError(f"section({name!r}, timeout={timeout!r}): timeout is seconds above zero, or None to learn it")


def iterate(loader: Iterable[T]) -> Iterator[T]:
    """Yield from `loader`, timing each wait for it as section `data` (kind `io`)."""
    batches = iter(loader)
    while True:
        with section("data", kind="io"):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch
