"""The agreement of ranks on a save or a resume: small JSON messages over CPU collectives."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from resilience_sdk.checkpoint.failure import number_of
from resilience_sdk.checkpoint.manifest import InvalidCheckpointError
from resilience_sdk.core.environ import environment, rank_identity
from resilience_sdk.errors import CheckpointError, ConfigError, ResilienceError
from resilience_sdk.recorder.lookup import TimedBlock
from resilience_sdk.straggler import section

Result = TypeVar("Result")

# One rank may write for long while the others wait for its word.
_PATIENCE = datetime.timedelta(hours=2)


class Ranks(Protocol):
    """The ranks that share a checkpoint. Both methods are collective: all ranks call them in one order."""

    rank: int
    size: int
    group: Any  # a process group on the CPU for torch's own collectives; None where there is one rank

    def broadcast(self, message: Any) -> Any:
        """Return rank 0's `message` (a JSON value) on every rank."""
        ...

    def gather(self, message: Any) -> list[Any]:
        """Return every rank's `message` (a JSON value) by rank, on every rank."""
        ...


class Alone:
    """A job of one rank: agrees with itself."""

    rank = 0
    size = 1
    group = None

    def broadcast(self, message: Any) -> Any:
        """Return `message`."""
        return message

    def gather(self, message: Any) -> list[Any]:
        """Return `message` in a list."""
        return [message]


class ProcessGroupRanks:
    """The ranks of the initialised default process group.

    The group of the program itself where that is gloo, else a gloo group beside it: these messages must
    neither need a GPU nor get into the order of a stream. Exceptions of torch.distributed pass through: a
    group that is broken has already ended the training.
    """

    def __init__(self) -> None:
        """Take the default group; collective unless it is gloo, as it then makes a group."""
        import torch.distributed as dist

        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.world = dist.group.WORLD
        self.group = self.world if dist.get_backend() == "gloo" else dist.new_group(timeout=_PATIENCE, backend="gloo")

    def broadcast(self, message: Any) -> Any:
        """Return rank 0's `message` on every rank; collective."""
        import torch
        import torch.distributed as dist

        data = _encode(message) if self.rank == 0 else b""
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self.group)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self.group)
        return json.loads(bytes(buffer.tolist()))

    def gather(self, message: Any) -> list[Any]:
        """Return every rank's `message` on every rank; collective."""
        import torch
        import torch.distributed as dist

        data = _encode(message)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
        width = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(data.ljust(width)), dtype=torch.uint8)
        rows = [torch.zeros(width, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self.group)
        # JSON does not mind the spaces that fill a row up.
        return [json.loads(bytes(row.tolist())) for row in rows]


def _encode(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def group_is_ready() -> bool:
    """Tell whether torch.distributed is initialised in this process; never imports torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available()) and bool(dist.is_initialized())


# One for all who ask: each of them may own a process group, and groups are made by all ranks together.
_found: ProcessGroupRanks | None = None


def find_ranks() -> Ranks:
    """Return the ranks of this job; collective the first time, and after the process group was made anew.

    Raises `ConfigError` in a job of several ranks that have no process group: they would all be the first.
    """
    global _found
    if group_is_ready():
        import torch.distributed as dist

        if dist.get_world_size() == 1:
            return Alone()
        if _found is None or _found.world is not dist.group.WORLD:
            _found = ProcessGroupRanks()
        return _found
    identity = rank_identity(environment())
    if identity is not None and identity.world_size > 1:
        raise ConfigError(
            f"this is rank {identity.rank} of {identity.world_size} ({identity.source}), but "
            f"torch.distributed is not initialised: call torch.distributed.init_process_group() before the "
            f"first checkpoint call, so that the ranks can agree on one"
        )
    return Alone()


def agreement() -> TimedBlock:
    """Return the section around what ranks agree on between two steps, where no other one is open.

    Without it those that wait in there for a rank that is gone would look as if their loop were over.
    """
    return section("agreement", kind="comm")


def raise_together(ranks: Ranks, action: Callable[[], Result]) -> Result:
    """Return what `action` does on this rank; what fails on one is raised on all, so that none waits. Collective.

    Raises a `ResilienceError` as `action` did, else `CheckpointError` naming the first rank.
    """
    mine: Exception | None = None
    results: list[Result] = []
    try:
        results.append(action())
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        mine = error
    reasons = ranks.gather(None if mine is None else [describe(mine), number_of(mine)])
    if isinstance(mine, ResilienceError):
        raise mine
    for rank, reason in enumerate(reasons):
        if reason is not None:
            why, number = reason
            failure = CheckpointError(f"rank {rank}: {why}" if ranks.size > 1 else why)
            failure.number = number
            raise failure from mine
    [result] = results
    return result


def describe(error: BaseException) -> str:
    """Return what a person needs to know of an exception, in one line where its text is one."""
    failures = getattr(error, "failures", None)  # of torch.distributed.checkpoint: by rank, with tracebacks
    if isinstance(failures, dict) and failures:
        rank, (cause, _) = sorted(failures.items(), key=lambda item: int(item[0]))[0]
        return f"rank {rank}: {describe(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    if isinstance(error, (ResilienceError, InvalidCheckpointError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


class BackgroundGroup:
    """A gloo group of all ranks for a thread beside the training's own collectives, made when it is needed."""

    def __init__(self, patience_s: float) -> None:
        self._patience = datetime.timedelta(seconds=patience_s)
        self._world: Any = None
        self.group: Any = None

    def make(self, ranks: Ranks) -> None:
        """Make it, if that was not done for the program's process group; raises as `raise_together`. Collective."""
        import torch.distributed as dist

        def make() -> None:
            self.group = dist.new_group(timeout=self._patience, backend="gloo")

        if self._world is not dist.group.WORLD:
            raise_together(ranks, make)
            self._world = dist.group.WORLD
