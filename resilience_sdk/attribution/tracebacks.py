"""Tracebacks and stack dumps in a log that several ranks write at once, each as the record that the rules read.

Timeout (0:05:00)!                                      Process 4242: python train.py
    Thread 0x00007f00a0000b80 (most recent call first):     Thread 4242 (active): "MainThread"
      File "/job/train.py", line 7 in step                      step (/job/train.py:7)

Only main threads tell: the others of a process wait by profession.

A stream is what one rank writes; lines without a rank are one stream of their own, in which the tracebacks of
several processes may lie inside one another, so each stream keeps a stack of them. Lines come one by one, and
what a stream holds is bounded.
"""

from __future__ import annotations

import re

import attrs

from resilience_sdk.attribution.exceptions import is_users_frame
from resilience_sdk.attribution.log_lines import LogLine

_SOURCE = ("   ", "\t", "|", "  |")  # deeper than a frame; a launcher's summary is not
_MOST_FRAMES = 200
_MOST_MESSAGE_LINES = 120
_MOST_OPEN = 16
_MOST_STREAMS = 4096
_MOST_SILENCE = 300  # lines after which a traceback that was cut off is no longer waited for
_HEADER = re.compile(r"^\s*(?:[|+] *)*(?:: )?Traceback \(most recent call last\):?(?P<more>.*)$")
_INNER = re.compile(r"Original Traceback \(most recent call last\)")
_FRAME = re.compile(r'^\s+(?:[|+] *)?File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,)? in (?P<name>\S.*)$')
_CHAIN = re.compile(r"^\s*(The above exception was the direct cause|During handling of the above exception)")
# `pkg.mod.SomeError: words`, `KeyboardInterrupt`; not `ERROR: words`, not `wandb: words`.
_EXCEPTION = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*[a-z]\w*)(?::\s?(?P<message>.*))?$")
_LIKELY = re.compile(
    r"(Error|Exception|Interrupt|Exit|Iteration|Warning|Timeout|\wKilled|Preempted|Failure|Empty|Full)$"
)
_DROPPED = re.compile(r"--- Logging error|Exception ignored in|Error in atexit|Error in sys\.excepthook")
_WRAPPER_TYPES = re.compile(r"(^|\.)(ChildFailedError|ProcessRaisedException)$")
_LAST_ERROR = "Last error:"
_NCCL_MORE = re.compile(rf"nccl[A-Z]\w+: |{_LAST_ERROR}")


@attrs.frozen
class Raised:
    """One exception of a log: a record as the rules read it, where it began, and what came before it in a chain.

    `frames` are innermost first. `chained`: it was raised while the one before it in this stream was handled.
    `number`: its first line, `last`: the one with its type and message.
    `mark`: what the caller gave with its first line, because a message ends long after it began.
    """

    number: int
    rank: int | None
    type: str
    message: str
    frames: tuple[str, ...]
    sources: tuple[str, ...]
    chained: bool
    time_s: float | None = None
    mark: int = 0
    last: int | None = None

    def record(self) -> dict[str, object]:
        """Return the record that `rules` and `fingerprint` read."""
        return {"type": self.type, "message": self.message, "frames": self.frames}


@attrs.define
class _Open:
    line: LogLine
    chained: bool
    dropped: bool
    mark: int = 0
    frames: list[str] = attrs.field(factory=list)
    sources: list[str] = attrs.field(factory=list)
    inner: bool = False
    type: str = ""
    last: int | None = None
    message: list[str] = attrs.field(factory=list)


@attrs.define
class _Stream:
    stack: list[_Open] = attrs.field(factory=list)
    ending: _Open | None = None  # its exception line was read; the message may go on
    chained: bool = False
    dropped: bool = False
    ended_dropped: bool = False  # so are those that it led to


class Tracebacks:
    """Feeds on lines; gives back exceptions as they end. `take` tells whether it used the line."""

    def __init__(self) -> None:
        self._streams: dict[int | None, _Stream] = {}
        self._last_taken = -_MOST_SILENCE
        self.finished: list[Raised] = []

    def is_open(self, number: int) -> bool:
        """Tell whether some traceback still waits for its end at line `number`, so that every next line matters."""
        return number - self._last_taken < _MOST_SILENCE and any(
            stream.stack or stream.ending for stream in self._streams.values()
        )

    def take(self, line: LogLine, mark: int = 0, *, may_begin: bool = True) -> bool:
        """Use a line if it belongs to a traceback, and tell whether it does; without `may_begin` none begins here."""
        taken = self._take(line, mark, may_begin)
        if taken:
            self._last_taken = line.number
        return taken

    def _take(self, line: LogLine, mark: int, may_begin: bool) -> bool:
        stream = self._streams.get(line.rank)
        header = _HEADER.match(line.text) if "Traceback" in line.text else None
        if header is not None and not may_begin:
            self._leave(stream)
            return False
        if stream is None:
            if header is None and not _DROPPED.search(line.text):
                return False
            if len(self._streams) >= _MOST_STREAMS:
                self.close()
                self._streams.clear()
            stream = self._streams.setdefault(line.rank, _Stream())
        if stream.ending is not None and self._continue_message(stream, stream.ending, line):
            return True
        if _DROPPED.search(line.text):
            stream.dropped = True
            return True
        if header is not None:
            self._begin(stream, line, mark)
            return True
        if _CHAIN.match(line.text):
            stream.chained = True
            return True
        if not stream.stack:
            return False
        return self._inside(stream, stream.stack[-1], line)

    def close(self) -> list[Raised]:
        """End every message; return what was cut off before its exception line, with an empty type."""
        cut = []
        for stream in self._streams.values():
            self._end_message(stream)
            cut += [_raised(open_) for open_ in stream.stack if open_.frames and not open_.dropped]
            stream.stack.clear()
        return cut

    def _leave(self, stream: _Stream | None) -> None:
        """Forget what is open: the frames that come now are another traceback's."""
        if stream is not None:
            self._end_message(stream)
            stream.stack.clear()

    def _begin(self, stream: _Stream, line: LogLine, mark: int) -> None:
        if len(stream.stack) >= _MOST_OPEN:
            del stream.stack[0]
        dropped = stream.dropped or (stream.chained and stream.ended_dropped)
        stream.stack.append(_Open(line, stream.chained, dropped, mark))
        stream.chained = stream.dropped = False

    def _inside(self, stream: _Stream, top: _Open, line: LogLine) -> bool:
        text = line.text
        frame = _FRAME.match(text)
        if frame is not None:
            if len(top.frames) < _MOST_FRAMES:
                top.frames.append(f"{frame['file']}:{frame['line']} {frame['name']}")
                top.sources.append("")
            return True
        if not text:
            return bool(top.frames)
        if text.startswith(_SOURCE):
            if top.sources and not top.sources[-1] and text.strip(" ^~|"):
                top.sources[-1] = text.strip()
            return True
        exception = _EXCEPTION.match(text)
        if exception is None or not (_LIKELY.search(exception["type"]) or top.frames) or line.prefixed:
            return False
        stream.stack.pop()
        top.type, top.message = exception["type"], [exception["message"] or ""]
        top.last = line.number
        stream.ending = top
        return True

    def _continue_message(self, stream: _Stream, ending: _Open, line: LogLine) -> bool:
        """Read one more line of a message, or end it."""
        if self._goes_on(ending, line):
            ending.message.append(line.text)
            frame = _FRAME.match(line.text) if ending.inner else None
            if frame is not None and len(ending.frames) < _MOST_FRAMES:
                ending.frames.append(f"{frame['file']}:{frame['line']} {frame['name']}")
                ending.sources.append("")
            ending.inner = ending.inner or _INNER.search(line.text) is not None
            return True
        self._end_message(stream)
        return False

    def _goes_on(self, ending: _Open, line: LogLine) -> bool:
        text = line.text
        if line.prefixed or len(ending.message) >= _MOST_MESSAGE_LINES or not text.strip():
            return False
        if _CHAIN.match(text) or _HEADER.match(text):
            return False
        if text[0] in " \t" or _INNER.search(text):
            return not (_FRAME.match(text) and not ending.inner)  # a frame here is of another traceback
        if ending.inner:
            return _EXCEPTION.match(text) is not None
        if line.rank is None:
            # Nothing tells whose a line is, but for those that only this message has.
            return ending.message[-1].startswith(_LAST_ERROR) or _NCCL_MORE.match(text) is not None
        return _EXCEPTION.match(text) is None

    def _end_message(self, stream: _Stream) -> None:
        ending, stream.ending = stream.ending, None
        if ending is not None:
            stream.ended_dropped = ending.dropped
        if ending is not None and not ending.dropped and not _WRAPPER_TYPES.search(ending.type):
            self.finished.append(_raised(ending))


def _raised(open_: _Open) -> Raised:
    return Raised(
        number=open_.line.number,
        rank=open_.line.rank,
        type=open_.type,
        message="\n".join(open_.message),
        frames=tuple(reversed(open_.frames)),
        sources=tuple(reversed(open_.sources)),
        chained=open_.chained,
        time_s=open_.line.time_s,
        mark=open_.mark,
        last=open_.last,
    )


def parse_exception_line(text: str) -> tuple[str, str] | None:
    """Return type and message of a line that reads like the last of a traceback, None when it does not."""
    match = _EXCEPTION.match(text)
    if match is None or not _LIKELY.search(match["type"]) or _WRAPPER_TYPES.search(match["type"]):
        return None
    return match["type"], match["message"] or ""


COLLECTIVE, READING, SAVING = "collective", "reading", "saving"
LOADER, STANDING, WORKING = "loader", "standing", "working"

_MOST_DUMPED_FRAMES = 100
_MOST_STACKS = 2000
_MOST_OPEN_DUMPS = 4096
_FAULTHANDLER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+(?: \[[^\]]*\])? \(most recent call first\):")
_PY_SPY = re.compile(r'^Thread (?:0x)?[0-9a-fA-F]+ \([\w+ ]+\)(?:: "(?P<name>[^"]*)")?\s*$')
_DUMPED_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.+)$')
_PY_SPY_FRAME = re.compile(r"^\s+(?P<name>\S.*?) \((?P<file>[^()]+?):(?P<line>\d+)\)$")
_FATAL = "Fatal Python error"
_MAIN = re.compile(r" (?:<module>|_run_module_as_main|spawn_main)$")
# Processes of the job that are no ranks.
_NO_RANK = re.compile(r"torch/utils/data/_utils/worker\.py|torch/distributed/(?:elastic|launcher)/|_worker_loop$")
_DISTRIBUTED = re.compile(r"torch/distributed/|/(?:deepspeed|megatron|fairscale)/.*\bcomm|\bncclComm|horovod/|mpi4py/")
_WRAPPER = re.compile(r" (?:wrapper|_?fn|decorate\w*|inner|wait|synchronize|log_wrapper)$")
_LOADER = re.compile(r"torch/utils/data/dataloader\.py|_try_get_data$")
_SAVING = re.compile(
    r"torch/serialization\.py:\d+ (?:_?save|_legacy_save|write)|torch/distributed/checkpoint/.*(?:save|write|writer)|"
    r" (?:_?save\w*(?:checkpoint|ckpt|state|model|snapshot)\w*|save|savez?\w*|save_file|save_pretrained|fsync)$"
)
_READING = re.compile(
    r" (?:_?open\w*|_io_open|read\w*|_read\w*|readinto|load(?:_\w+)?|_load\w*|fromfile|memmap|mmap|scandir|listdir|"
    r"glob|_iterdir|iterdir|walk|stat|_?exists|isfile|isdir|getsize)$"
)
_STANDING = re.compile(
    r"/(?:threading|queue|selectors|socket|subprocess|ssl)\.py:\d+ |"
    r"multiprocessing/(?:connection|queues|synchronize|pool)\.py:|"
    r" (?:sleep|wait|acquire|join|poll|select|recv\w*|communicate)$"
)
_DEEP = 4  # frames from the innermost one on that say what a thread does


@attrs.frozen
class Stack:
    """Where the main thread of one process was. `frames`: `file:line function`, innermost first.

    `place`: the innermost frame of the user's program. `progress`: lines that told of a step up to here.
    """

    number: int
    text: str
    rank: int | None
    frames: tuple[str, ...]
    progress: int = 0

    @property
    def place(self) -> str | None:
        """The innermost frame of the user's program."""
        return next(filter(is_users_frame, self.frames), None)

    @property
    def doing(self) -> str:
        """What it did, one of this module's words."""
        if _DISTRIBUTED.search(self.frames[0]):
            # A store that is written to by torch is below `torch/distributed` too.
            return SAVING if _any(_SAVING, self.frames[:_DEEP]) else COLLECTIVE
        near = self.frames[:_DEEP]
        for what, pattern in ((LOADER, _LOADER), (SAVING, _SAVING)):
            if _any(pattern, self.frames[: 2 * _DEEP]):
                return what
        if any(_DISTRIBUTED.search(frame) for frame in near) and _STANDING.search(near[0]):
            return COLLECTIVE
        if _STANDING.search(near[0]):
            return STANDING
        return READING if _any(_READING, near) else WORKING

    @property
    def collective(self) -> str:
        """The name of the operation of `torch.distributed` that it waits in."""
        names = [frame.rpartition(" ")[2] for frame in self.frames if _DISTRIBUTED.search(frame)]
        called = [name for name in names if not _WRAPPER.search(f" {name}")]
        return called[0] if called else ""


@attrs.define
class _OpenDump:
    line: LogLine
    main: bool  # py-spy names it
    progress: int
    frames: list[str] = attrs.field(factory=list)


class StackDumps:
    """Feeds on lines; `stacks` are those of main threads. `take` tells whether it used the line."""

    def __init__(self) -> None:
        self.stacks: list[Stack] = []
        self._open: dict[int | None, _OpenDump] = {}
        self._fatal: dict[int | None, bool] = {}

    def take(self, line: LogLine, progress: int) -> bool:
        """Use a line if it is of a dump."""
        if self._open and line.rank in self._open:
            if self._frame(self._open[line.rank], line.text):
                return True
            self._end(line.rank)
        if _FATAL in line.text:
            # Who dies prints its stack too, and waits for nobody.
            self._fatal[line.rank] = True
            return False
        if not line.text.startswith(("Thread ", "Current thread ")):
            if self._fatal and line.text.strip():
                self._fatal.pop(line.rank, None)
            return False
        spied = _PY_SPY.match(line.text)
        if spied is None and _FAULTHANDLER.match(line.text) is None:
            return False
        if len(self._open) < _MOST_OPEN_DUMPS and line.rank not in self._fatal:
            self._open[line.rank] = _OpenDump(line, spied is not None and spied["name"] == "MainThread", progress)
        return True

    def close(self) -> None:
        """End what is open."""
        for rank in list(self._open):
            self._end(rank)

    def _frame(self, top: _OpenDump, text: str) -> bool:
        match = _DUMPED_FRAME.match(text) or _PY_SPY_FRAME.match(text)
        if match is None:
            return False
        if len(top.frames) < _MOST_DUMPED_FRAMES:
            top.frames.append(f"{match['file']}:{match['line']} {match['name'].strip()}")
        return True

    def _end(self, rank: int | None) -> None:
        top = self._open.pop(rank)
        is_main = top.main or (bool(top.frames) and _MAIN.search(top.frames[-1]) is not None)
        if not top.frames or not is_main or _any(_NO_RANK, top.frames) or len(self.stacks) >= _MOST_STACKS:
            return
        self.stacks.append(Stack(top.line.number, top.line.text, top.line.rank, tuple(top.frames), top.progress))


def _any(pattern: re.Pattern[str], frames: tuple[str, ...] | list[str]) -> bool:
    return any(pattern.search(frame) for frame in frames)
