"""The error file of `torch.distributed.elastic`, as its `@record` writes it, for scripts that do not use it.

torchrun reads it to say which rank failed first and with what; without it, it knows an exit code.
"""

from __future__ import annotations

import json
import math
import os
import time
import traceback

from resilience_sdk import environ
from resilience_sdk.attribution.rules import is_peer_symptom
from resilience_sdk.console import say_once
from resilience_sdk.session.exceptions import describe

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def _timestamp(error: BaseException) -> int:
    """Return the time in whole seconds, by which torchrun finds the first; of two in one second it takes either.

    So who only tells of a peer that is gone has it rounded up: the cause came before.
    """
    now = time.time()
    return math.ceil(now) if is_peer_symptom(describe(error, None)) else int(now)


def write_error_file(error: BaseException) -> None:
    """Write the file that the launcher named, unless the script's own `@record` already did; never raises.

    What ends a process on purpose (SystemExit, Ctrl-C) is no failure to be told, here as there.
    """
    path = environ.environment().get(_VARIABLE)
    if not path or not isinstance(error, Exception):
        return
    try:
        if os.path.exists(path) and os.path.getsize(path):
            return
        stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        extra = {"py_callstack": stack, "timestamp": str(_timestamp(error))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
        text = json.dumps({"message": message})
        with open(path, "w") as file:
            file.write(text)
    except Exception as failure:  # noqa: BLE001 - the script's own exception matters more
        say_once("error-file", f"could not write {path} ({type(failure).__name__}: {failure})")
