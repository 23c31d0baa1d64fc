"""What a rank writes down about the exception that ends it."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from resilience_sdk.whole_file import write_whole

_MAX_FRAMES = 100
_MAX_MESSAGE = 4000
_OWN = f"{Path(__file__).resolve().parent.parent}{os.sep}"  # not the user's resilience_sdk_example beside it


def describe(error: BaseException, step: int | None) -> dict[str, Any]:
    """Return `{type, message, frames, user_frame, step}` of an exception; frames are innermost first."""
    frames = list(reversed(traceback.extract_tb(error.__traceback__)))[:_MAX_FRAMES]
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        "message": str(error)[:_MAX_MESSAGE],
        "frames": [_show(frame) for frame in frames],
        "user_frame": next((_show(frame) for frame in frames if is_user_file(frame.filename)), None),
        "step": step,
    }


def write(path: Path, error: BaseException, step: int | None) -> None:
    """Write the description of `error` to `path` at once (rename). Raises OSError."""
    write_whole(path, json.dumps(describe(error, step)))


def is_user_file(filename: str) -> bool:
    """Tell whether a source file is the user's: not the library's, an installed package's or the SDK's."""
    if filename.startswith(("<", _OWN)):
        return False
    paths = sysconfig.get_paths()
    return not any(filename.startswith(paths[kind]) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def ended_by() -> BaseException | None:
    """Return the exception that is ending this process, seen from a clean-up handler; None for a clean end.

    multiprocessing turns the user's exception into `SystemExit(1)`; its context is the one that counts.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return None
        return error.__context__ or error
    return error


def _show(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} {frame.name}"
