"""`@resilient`: a train step that beats, and that leaves when the job is asked to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from resilience_sdk import preemption
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.session.run import is_stepping

F = TypeVar("F", bound=Callable[..., Any])


def resilient(train_step: F) -> F:
    """Decorate the function of one optimizer step: each call is a heartbeat, and ends with a check for preemption.

    Where a model is attached (`straggler.attach`), its sections are inside the heartbeat. When all ranks have
    agreed to stop, the call raises `Preempted` after its step is complete, on every rank at the same call; catch it
    around the loop, save, and raise it again. So all ranks must call it equally often. Inside `Run.steps` nothing is
    added, because the run does both. Takes functions and coroutine functions.

    Raises:
        ConfigError: It is put on something that is no function.
        TypeError: It is put on a generator function.

    Example:
        @resilience_sdk.resilient
        def train_step(batch): ...

        try:
            for batch in loader:
                train_step(batch)
        except resilience_sdk.Preempted:
            save()
            raise
    """
    if not callable(train_step):
        raise ConfigError(f"@resilient goes on the function of a train step, got {train_step!r}")
    beating = heartbeat()(train_step)

    if inspect.iscoroutinefunction(train_step):

        @functools.wraps(train_step)
        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            if is_stepping():
                return await train_step(*args, **kwargs)
            result = await beating(*args, **kwargs)
            _leave_if_asked()
            return result

        return cast(F, run_coroutine)

    @functools.wraps(train_step)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_stepping():
            return train_step(*args, **kwargs)
        result = beating(*args, **kwargs)
        _leave_if_asked()
        return result

    return cast(F, run)


def _leave_if_asked() -> None:
    if preemption.check():
        heartbeat.done()  # saving may take any time
        raise Preempted
