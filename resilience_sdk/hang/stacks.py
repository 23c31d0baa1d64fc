"""Stacks as faulthandler writes them, and what they say about waiting and working."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs

_HEADER = re.compile(
    r"(?:(?P<kind>Current thread|Thread) (?P<ident>0x[0-9a-fA-F]+)(?: \[(?P<name>.*)\])?|Stack)"
    r" \(most recent call first\):$"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_MAX_CHARACTERS = 4 * 1024 * 1024


@attrs.frozen
class ThreadStack:
    """One thread of a dump. `frames`: `file:line function`, innermost first."""

    ident: int
    name: str
    is_current: bool
    frames: tuple[str, ...]


def parse_faulthandler(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of the last complete dump in a file that dumps were appended to.

    A dump that is still being written (its last line is cut, or the thread that took the signal is missing)
    is passed over for an earlier one; where none is complete, what there is of the last one is returned.
    """
    text = text[-_MAX_CHARACTERS:]
    dumps: list[list[ThreadStack]] = []
    blank = False
    header: re.Match[str] | None = None
    frames: list[str] = []

    def close() -> None:
        if header is not None:
            current = header["kind"] != "Thread"
            dumps[-1].append(ThreadStack(_ident(header), header["name"] or "", current, tuple(frames)))

    for line in text.split("\n"):
        found = _HEADER.match(line.rstrip("\r"))
        if found:
            close()
            # Threads of one dump are set apart by an empty line; two dumps are not, or repeat a thread.
            if not dumps or not blank or _ident(found) in {t.ident for t in dumps[-1]}:
                dumps.append([])
            header, frames = found, []
        elif frame := _FRAME.match(line.rstrip("\r")):
            frames.append(f"{frame['file']}:{frame['line']} {frame['function']}")
        blank = not line
    close()
    return _last_complete(dumps, text.endswith("\n"))


def _ident(header: re.Match[str]) -> int:
    """Return the thread's identity; 0 in a dump of one thread, which does not tell it."""
    return int(header["ident"] or "0", 16)


def _last_complete(dumps: Sequence[Sequence[ThreadStack]], ends_whole: bool) -> tuple[ThreadStack, ...]:
    for number in range(len(dumps) - 1, -1, -1):
        whole = ends_whole or number < len(dumps) - 1
        if whole and any(thread.is_current for thread in dumps[number]):
            return tuple(dumps[number])
    return tuple(dumps[-1]) if dumps else ()


def main_frames(threads: Sequence[ThreadStack]) -> tuple[str, ...]:
    """Return the frames of the main thread: the oldest one that `threading` did not start."""
    others = [t for t in threads if t.frames and not t.frames[-1].endswith(" _bootstrap")]
    if others:
        return others[-1].frames
    return next((t.frames for t in threads if t.is_current), ())


# Frames that only pass a call on, and sit on top of the function that says what is being done.
_WRAPPERS = ("/torch/_ops.py:", "/torch/utils/_contextlib.py:", "/torch/_compile.py:")
_COLLECTIVE_PLACES = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py:",
    "/torch/nn/modules/_functions.py:",
)
# Below torch/distributed, but about files and processes, not about peers.
_NO_COLLECTIVE = (
    "/torch/distributed/checkpoint/",
    "/torch/distributed/run.py:",
    "/torch/distributed/launcher/",
    "/torch/distributed/elastic/multiprocessing/",
)
_ENGINE = re.compile(r"/torch/autograd/(graph\.py:\S+ _engine_run_backward|__init__\.py:\S+ (backward|grad))$")
_DEVICE_WAIT = re.compile(r"/torch/(cuda|accelerator)/\w+\.py:\S+ (synchronize|wait|wait_event|wait_stream)$")


def is_in_collective(frames: Sequence[str]) -> bool:
    """Tell whether a stack (innermost first) waits for other ranks.

    True in functions of `torch.distributed` (collectives, barriers, store waits), inside the autograd engine
    (where DDP reduces gradients; a Python hook on top of it counts as itself), and in waits for a device,
    whose stream stands behind a collective. The calls themselves are C, so the innermost Python frame tells.
    """
    top = next((frame for frame in frames if not any(place in frame for place in _WRAPPERS)), "")
    if any(place in top for place in _NO_COLLECTIVE):
        return False
    if any(place in top for place in _COLLECTIVE_PLACES):
        return not top.endswith(" forward")  # DDP.forward on top computes, or waits for nobody
    return bool(_ENGINE.search(top) or _DEVICE_WAIT.search(top))


# Only on the stack while something is compiled: running compiled code does not pass through them.
_COMPILING = (
    "/torch/_dynamo/convert_frame.py:",
    "/torch/_dynamo/symbolic_convert.py:",
    "/torch/_inductor/compile_fx.py:",
    "/torch/_inductor/codecache.py:",
    "/torch/_inductor/async_compile.py:",
    "/torch/_inductor/select_algorithm.py:",
    "/torch/_inductor/scheduler.py:",
    "/torch/utils/cpp_extension.py:",
    "/triton/compiler/",
    "/triton/runtime/autotuner.py:",
)
_SAVING = ("/torch/serialization.py:", "/torch/distributed/checkpoint/", "/safetensors/")
_RUNS_COMPILED = re.compile(r"/torch/_inductor/compile_fx\.py:\S+ (run|runtime_wrapper|wrapper)$")
# A person is asked: pdb and its kin, IPython, and debuggers of editors, which need neither ptrace nor a terminal.
_PROMPT = re.compile(
    r"/(cmd\.py:\S+ cmdloop|code\.py:\S+ (raw_input|interact)|pudb/\S+ \w+"
    r"|IPython/terminal/\S+ \w+|(pydevd|_pydevd_bundle/\S+?)\.py:\S+ _?do_wait_suspend)$"
)


_IMPORTER = "<frozen importlib._bootstrap"
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")


def busy_with(frames: Sequence[str]) -> str | None:
    """Return what a stack is known to take long with: `prompt`, `compile`, `checkpoint`, `import`; else None.

    `prompt` is a debugger or shell inside the program that waits for a person.
    """
    if any(_PROMPT.search(frame) for frame in frames):
        return "prompt"
    if any(place in frame for frame in frames for place in _COMPILING if not _RUNS_COMPILED.search(frame)):
        return "compile"
    if any(place in frame for frame in frames for place in _SAVING):
        return "checkpoint"
    return "import" if _imports_library(frames) else None


def _imports_library(frames: Sequence[str]) -> bool:
    """Tell whether the innermost import is of a library: slow where many ranks read one file system.

    A user's module does not count: a whole training may run while it is imported.
    """
    place = next((number for number, frame in enumerate(frames) if frame.startswith(_IMPORTER)), None)
    return place is not None and (place == 0 or any(part in frames[place - 1] for part in _LIBRARIES))
