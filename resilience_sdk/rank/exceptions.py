"""The exception that ends a rank.

Its record in the page directory, and the error file of torch.distributed.elastic.

torchrun reads it to say which rank failed first and with what; without it, it knows an exit code.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from resilience_sdk.attribution.exceptions import is_peer_symptom, is_users_frame, match_exception
from resilience_sdk.attribution.exits import PORT, failed_resource
from resilience_sdk.core import environ
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say_once
from resilience_sdk.core.plain_file import plain
from resilience_sdk.core.port_holder import port_in, words_of_holder
from resilience_sdk.core.redaction import redact_text

_MAX_FRAMES = 100
_MAX_MESSAGE = 4000
_MAX_TRACEBACK = 16_000
_OWN = f"{Path(__file__).resolve().parent.parent}{os.sep}"  # not the user's resilience_sdk_example beside it
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
# How torch's DataLoader and multiprocessing's pools bring the traceback of another process along, as text.
_CAUGHT = re.compile(r"^Caught (?P<type>\w+) in (?P<where>DataLoader worker process \d+|pin memory thread.*?)\.$", re.M)
_TRACEBACK = "Traceback (most recent call last):"
_ELSEWHERE = f"Original {_TRACEBACK}"
_SPAWNED = re.compile(r"^-- Process (?P<child>\d+) terminated with the following error:$", re.M)


def describe(error: BaseException, step: int | None) -> dict[str, Any]:
    """Return `{type, message, frames, user_frame, step, traceback}` of an exception; frames are innermost first.

    One that was raised in a DataLoader worker, a process of a pool or one that `torch.multiprocessing.spawn` has
    started has the frames from there before those of the rank, and its own words first; of the last kind it is told
    by its own type, too. Secrets are taken out here, before anything is cut off: a part of one would not be known
    again, and this process alone knows the variables that its script has set.
    """
    frames = [(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_tb(error.__traceback__))]
    frames = [*_frames_elsewhere(error), *frames][:_MAX_FRAMES]
    text = redact_text("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    kind, message = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."), str(error)
    if (spawned := _raised_in_spawned(message)) is not None:
        kind, message = spawned
    if (name := _unresolved(error)) is not None and name not in message:
        message = f"{message} (asked for {name!r})"  # not waited for: it may be a wrong one
    return {
        "type": kind,
        "message": redact_text(_message(message))[:_MAX_MESSAGE],
        "frames": [_show(*frame) for frame in frames],
        "user_frame": user_frame(frames),
        "step": step,
        "traceback": _shortened(text),
    }


def _unresolved(error: BaseException) -> str | None:
    """Return the name that an error of the resolver does not say, from the call that met it; None for other errors."""
    if not isinstance(error, socket.gaierror):
        return None
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_name == "getaddrinfo" and isinstance(name := frame.f_locals.get("host"), str):
            return name
    return None


def write(path: Path, error: BaseException, step: int | None, **facts: Any) -> None:
    """Write the description of `error`, and `facts`, to `path` at once (rename). Raises OSError.

    Of a port in use it names the holder as well: the process that met it asks first, while the holder is still there.
    """
    told = describe(error, step)
    if (holder := _port_holder(told)) is not None:
        told["port_holder"] = holder
    write_whole(path, json.dumps({**told, **facts}))


def _port_holder(told: Mapping[str, Any]) -> str | None:
    """Return who holds the port that an exception says is in use; None for every other exception."""
    rule = match_exception(told)
    resource = failed_resource(rule.cause, ()) if rule is not None else None
    if resource is None or resource.kind != PORT:
        return None
    port = port_in(told["message"])
    return None if port is None else words_of_holder(port)


def frames_in(text: str) -> list[tuple[str, int, str]]:
    """Return `(file, line, function)` of the frames in the text of a traceback, innermost first."""
    return [(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(text)][::-1]


def user_frame(frames: Iterable[tuple[str, int, str]]) -> str | None:
    """Return the first of these frames that is the user's, as it is shown; None where none is."""
    return next((_show(*frame) for frame in frames if is_user_file(frame[0])), None)


def is_user_file(filename: str) -> bool:
    """Tell whether a source file is the user's: not the library's, an installed package's or the SDK's."""
    if filename.startswith(("<", _OWN)) or not is_users_frame(f"{filename}:1 _"):
        return False  # a virtual environment may use the packages of the Python that it was made from
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


def chain_excepthook(record: Callable[[BaseException], None]) -> None:
    """Have `record` called with what ends this process, before whoever was to be told is; not in its children."""
    previous, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if os.getpid() == pid:
            record(error)
        previous(kind, error, trace)

    sys.excepthook = hook


def chain_thread_hook(record: Callable[[BaseException, str], None]) -> None:
    """Have `record` called with what ends a thread, and the thread's name; not in its children."""
    previous, pid = threading.excepthook, os.getpid()

    def hook(args: threading.ExceptHookArgs) -> None:
        if os.getpid() == pid and args.exc_value is not None and args.exc_type is not SystemExit:
            record(args.exc_value, args.thread.name if args.thread is not None else "")
        previous(args)

    if previous is threading.__excepthook__:
        # A script that asks whether somebody has replaced the hook, or puts the first one back, finds no difference.
        threading.__excepthook__ = hook
    threading.excepthook = hook


def _frames_elsewhere(error: BaseException) -> list[tuple[str, int, str]]:
    message = str(error)
    if _ELSEWHERE in message:
        return frames_in(message[message.rindex(_ELSEWHERE) :])
    if (spawned := _SPAWNED.search(message)) is not None:
        return frames_in(_last_traceback(message[spawned.end() :]))
    cause = error.__cause__
    return frames_in(str(cause)) if type(cause).__name__ in ("RemoteTraceback", "_RemoteTraceback") else []


def _raised_in_spawned(message: str) -> tuple[str, str] | None:
    """Return type and message of what a spawned process has raised, by the text that its parent got; None elsewhere."""
    spawned = _SPAWNED.search(message)
    if spawned is None:
        return None
    lines = _last_traceback(message[spawned.end() :]).rstrip().splitlines()
    raised = next((number for number, line in enumerate(lines) if number and line[:1].strip()), None)
    if raised is None:
        return None
    kind, _, said = lines[raised].partition(": ")
    if not kind.replace(".", "").isidentifier():
        return None
    said = "\n".join([said, *lines[raised + 1 :]])
    return kind, f"{said} (in process {spawned['child']} of torch.multiprocessing.spawn)\n{message}"


def _last_traceback(text: str) -> str:
    begin = text.rfind(_TRACEBACK)
    return text[begin:] if begin >= 0 else text


def _message(message: str) -> str:
    """Return the message; one that was brought along from a worker begins with what the worker said, not with where."""
    caught = _CAUGHT.match(message)
    if caught is None or _ELSEWHERE not in message:
        return message
    lines = message.rstrip().splitlines()
    said = next((line for line in reversed(lines) if re.match(rf"(\w+\.)*{caught['type']}\b", line)), "")
    said = said.partition(": ")[2]
    return f"{said} ({lines[0].rstrip('.')})\n{message}" if said else message


def _shortened(text: str) -> str:
    if len(text) <= _MAX_TRACEBACK:
        return text
    half = _MAX_TRACEBACK // 2
    return f"{text[:half]}\n  ...\n{text[-half:]}"


def _show(filename: str, line: int, name: str) -> str:
    return f"{filename}:{line} {name}"


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
        if _is_whole(path):
            return
        stack = redact_text("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        extra = {"py_callstack": stack, "timestamp": str(_timestamp(error))}
        message = {"message": redact_text(f"{type(error).__name__}: {error}"), "extraInfo": extra}
        _write(Path(os.path.realpath(path)), json.dumps({"message": message}))
    except Exception as failure:  # noqa: BLE001 - the script's own exception matters more
        say_once("error-file", f"could not write {path} ({type(failure).__name__}: {failure})")


def _is_whole(path: str) -> bool:
    """Tell whether the script's own `@record` has written the file: torch writes in place, and a full disk cuts it."""
    if not os.path.isfile(path):
        return False  # a FIFO would be waited for
    try:
        with open(path, encoding="utf-8", opener=plain) as file:
            return isinstance(json.load(file), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _write(path: Path, text: str) -> None:
    """Write the file at once: torchrun's agent dies of one that is there in part, as where a rank was killed in it."""
    if path.exists() and not path.is_file():
        # /dev/null, say, in whose place nobody may put a file.
        with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "w", encoding="utf-8") as file:
            file.write(text)
    else:
        write_whole(path, text)
