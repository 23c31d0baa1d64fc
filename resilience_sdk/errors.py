"""Every exception that the SDK raises on purpose.

    Exception
    └── ResilienceError            the SDK was used in a way that it cannot serve
        ├── ConfigError            (also ValueError) a setting, option or argument is wrong
        ├── RunDirectoryError      the run directory cannot be used, or not be written
        │   └── DirectoryInUseError  another live job uses it, or another process writes its checkpoints
        ├── CheckpointError        a checkpoint cannot be written or read
        │   └── NotSavedError      the training has ended, and its last state could not be saved
        ├── NumericsError          (also ArithmeticError) a loss or gradient norm is bad, and the policy is to leave
        └── MissingExtraError      (also ImportError) an optional dependency is not installed
    SystemExit
    └── Preempted                  control flow: the job was asked to leave, saved, and leaves with 75

The SDK's own failures never appear here: they degrade to a no-op with one line (see `console`).
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DirectoryInUseError",
    "MissingExtraError",
    "NotSavedError",
    "NumericsError",
    "Preempted",
    "ResilienceError",
    "RunDirectoryError",
]

EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class ResilienceError(Exception):
    """Base of everything that the SDK raises because of what its user asked for."""


class ConfigError(ResilienceError, ValueError):
    """A setting, option or argument is unknown or has a bad value; the message names it and the cure."""


class RunDirectoryError(ResilienceError):
    """The run directory cannot be used; the message says why and what to do."""


class DirectoryInUseError(RunDirectoryError):
    """Another live job uses the run directory, or another process writes its checkpoints; the message names it."""


class CheckpointError(ResilienceError):
    """A checkpoint could not be written, or holds what cannot be loaded."""

    number: int | None = None
    """The error number of the system, where one kept it from being written."""


class NotSavedError(CheckpointError):
    """The training has ended and its last state could not be saved; the message says what is lost, and where to go on.

    Raised on every rank, so that the process ends with 1: a training whose result is gone is not finished.
    """


class NumericsError(ResilienceError, ArithmeticError):
    """A loss or gradient norm was NaN, infinite or a spike, and `numerics.check` was told not to go on with it."""


class MissingExtraError(ResilienceError, ImportError):
    """An optional dependency is missing; the message names the extra that brings it."""


class Preempted(SystemExit):
    """The job was asked to leave and every rank stopped at the same step.

    A `SystemExit` and so no `Exception`: `except Exception` in user code does not swallow it, and
    an uncaught one ends the process with exit code 75, which launchers and schedulers requeue.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)
