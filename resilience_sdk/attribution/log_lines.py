"""One line of a job's log: who wrote it, when, how seriously, and what is left without that. Pure.

The forms that launchers, loggers and kernels put before the words of a program, in any order:

    [rank3]: [default3]: [3]: (Worker pid=7) [1,3]<stderr>:     torch, torchrun, Ray, vLLM, Open MPI
    3:                                                          srun --label
    2026-01-31 10:00:00,123 [Sat Mar  4 04:10:52 2023] [12.34]  clocks of loggers and of the kernel
    W1120 22:16:41.501000 19819 torch/distributed/run.py:874]   glog
    INFO [WARNING] ERROR: kern :warn :                          levels
"""

from __future__ import annotations

import re

import attrs

_MOST_CHARACTERS = 4000
_MOST_PREFIXES = 8
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_DATE = r"\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_KERNEL_DATE = r"(?:\w{3} )?\w{3} +\d+ (?:\d{4} )?\d\d:\d\d:\d\d(?: \d{4})?"
_LEVELS = {
    "D": "DEBUG", "DEBUG": "DEBUG", "TRACE": "DEBUG", "I": "INFO", "INFO": "INFO", "NOTICE": "INFO",
    "W": "WARNING", "WARN": "WARNING", "WARNING": "WARNING", "E": "ERROR", "ERR": "ERROR", "ERROR": "ERROR",
    "F": "FATAL", "C": "FATAL", "FATAL": "FATAL", "CRITICAL": "FATAL",
}  # fmt: skip
_PREFIX = re.compile(
    r"""\s*(?:
      \[\s*(?:global[_ ]?|local[_ ]?)?[Rr]ank[: ]?\s*(?P<rank1>\d{1,6})\]:?
    | \[default(?P<rank2>\d{1,4})\]:
    | (?P<rank3>\d{1,5}):(?=\s|\[|$)
    | \[\d+,(?P<rank4>\d{1,6})\]<(?:stdout|stderr|std\w*)>:?
    | \((?=[^()]{0,200}\b(?:pid|rank)=)(?:[^()]{0,120}?\brank=(?P<rank5>\d{1,6}))?[^()]{0,120}\)
    | [Rr]ank\ (?P<rank6>\d{1,6}):
    | \[(?P<glog1>[DIWEF])\d{3,4}\ (?P<clock1>\d\d:\d\d:\d\d)[.\d]*(?:\ \d+)?\ [^\]\s]+\]
    | (?P<glog2>[DIWEF])\d{4}\ (?P<clock2>\d\d:\d\d:\d\d)[.\d]*\s+\d+\ [^\]\s]+\]
    | \[?(?P<date>"""
    + _DATE.replace(" ", r"\ ")
    + r""")\]?(?:,\d+)?
    | \[(?P<kernel>"""
    + _KERNEL_DATE.replace(" ", r"\ ")
    + r""")\]
    | (?P<uptime>\[\s*\d+\.\d+\])
    | \w{3}\ [ \d]\d\ \d\d:\d\d:\d\d\ (?P<node>[\w.-]+)\ (?=kernel:)
    | (?P<uptime2>kernel:)
    | \w+\s*:(?P<kern>emerg|alert|crit|err|warn|notice|info|debug)\s*:
    | [\[(<]?(?P<level>DEBUG|TRACE|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL)[\])>]?(?::(?:[\w.]+:)?)?(?=\s|-|$)
    | -\s
    )""",
    re.VERBOSE,
)
_OF_KERNEL = ("uptime", "kern", "node")
_KERN_LEVELS = {"emerg": "FATAL", "alert": "FATAL", "crit": "FATAL", "err": "ERROR", "warn": "WARNING"}


@attrs.frozen
class LogLine:
    """A line without its prefixes. `rank` and `level` are None where the line does not tell.

    `time_s`: seconds of the wall clock that the line carries; comparable within one log only. `prefixed`: it
    had a clock or a level, so it begins a message and does not continue one. `of_kernel`: the kernel's log has it so.
    """

    number: int
    text: str
    rank: int | None = None
    node: str | None = None
    level: str | None = None
    time_s: float | None = None
    prefixed: bool = False
    of_kernel: bool = False


def parse_line(number: int, raw: bytes) -> LogLine:
    """Take one line apart; bytes that are no UTF-8 are replaced, colours removed, and a very long line cut."""
    if len(raw) > 2 * _MOST_CHARACTERS:
        raw = raw[:_MOST_CHARACTERS] + b" ... " + raw[-_MOST_CHARACTERS:]
    text = raw.decode("utf-8", "replace").rstrip()
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    rank = node = level = time_s = None
    prefixed = of_kernel = False
    end = 0
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(text, end)
        if match is None:
            break
        end = match.end()
        kind = match.lastgroup
        of_kernel |= kind is not None and kind.startswith(_OF_KERNEL)
        if kind is None or kind.startswith("uptime"):
            continue  # a mere dash or the kernel's uptime
        value = match[kind]
        if kind.startswith("rank"):
            rank = int(value) if rank is None else rank
            continue
        prefixed = True
        if kind.startswith("clock"):
            level = level or _LEVELS[match["glog" + kind[-1]]]
            time_s = _seconds(value) if time_s is None else time_s
        elif kind == "date":
            time_s = _seconds(value[11:]) if time_s is None else time_s
        elif kind == "level":
            level = level or _LEVELS[value]
        elif kind == "kern":
            level = level or _KERN_LEVELS.get(value, "INFO")
        elif kind == "node":
            node = value
    # One space belongs to the prefix; more is indentation, by which tracebacks are told.
    text = text[end:].removeprefix(" ") if end else text
    return LogLine(number, text, rank, node, level, time_s, prefixed, of_kernel)


def _seconds(clock: str) -> float:
    """Return the seconds of `10:20:30` since midnight."""
    return int(clock[:2]) * 3600.0 + int(clock[3:5]) * 60 + int(clock[6:8])
