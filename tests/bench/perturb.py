"""The same fault in other words: logs changed in ways that change nothing about their cause.

Rules that learned a file by heart fail on these. Each change is deterministic for a given seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

_RANK = re.compile(r"(?i)(?<=\brank)(\s*[:=]?\s*)(\d{1,3})\b")
_PATHS = (
    (re.compile(r"/opt/venv/lib/python3\.\d+"), "/usr/lib64/python3.12"),
    (re.compile(r"/workspace/job"), "/home/kim/exp"),
)
_CLOCK = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)
_RANKED = re.compile(r"^\[rank(\d+)\]: ?", re.MULTILINE)
_VERSIONS = (
    ("pair.cc:553", "pair.cc:598"),
    ("pair.cc:537", "pair.cc:144"),
    ("unbound_buffer.cc:78", "unbound_buffer.cc:81"),
    ("ProcessGroupNCCL.cpp", "NCCLUtils.cpp"),
    ("inline_container.cc:672", "inline_container.cc:603"),
    ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"),
    ("slurmstepd: error:", "slurmstepd-node17: error:"),
)
_CHATTER = (
    "INFO loading tokenizer from cache",
    "UserWarning: this API is deprecated and may fail in a future release",
    "WARNING connection to metrics server timed out, retrying in 5 s",
    "DEBUG no errors so far, 0 failed requests",
)


def renumber_ranks(text: str, seed: int) -> str:
    """Give every rank another number, the same one everywhere."""
    found = sorted({int(match[2]) for match in _RANK.finditer(text)})
    others = random.Random(seed).sample(found, len(found))
    new = dict(zip(found, others, strict=True))
    return _RANK.sub(lambda match: f"{match[1]}{new[int(match[2])]}", text)


def other_paths(text: str, seed: int) -> str:
    """Put the interpreter and the program elsewhere."""
    for pattern, replacement in _PATHS:
        text = pattern.sub(replacement, text)
    return text


def other_versions(text: str, seed: int) -> str:
    """Use the line numbers and names of other versions of the same programs."""
    for old, new in _VERSIONS:
        text = text.replace(old, new)
    return text


def other_prefixes(text: str, seed: int) -> str:
    """Let another launcher label the lines: `[default3]:` instead of `[rank3]: `, another clock."""
    text = _RANKED.sub(lambda match: f"[default{match[1]}]:", text)
    return _CLOCK.sub("[2025-03-04 05:06:07,089] ", text)


def chatter(text: str, seed: int) -> str:
    """Strew harmless lines between the others, but not into tracebacks."""
    lines, dice = text.split("\n"), random.Random(seed)
    out: list[str] = []
    for line in lines:
        if dice.random() < 0.1 and re.match(r"\d{4}-\d\d-\d\d |\[[\d.]+\]|W\d{4} ", line):
            out.append(f"2026-11-20 22:00:00 {dice.choice(_CHATTER)}")
        out.append(line)
    return "\n".join(out)


def terminal(text: str, seed: int) -> str:
    """Write it as a terminal saw it: colours, a progress bar, and bytes that are no UTF-8."""
    lines = text.split("\n")
    painted = [
        f"\x1b[31m{line}\x1b[0m" if number % 3 == 0 and line and line[0] != " " else line
        for number, line in enumerate(lines)
    ]
    return "\r 10%|#         | 1/10\r 20%|##        | 2/10\n" + "\r\n".join(painted)


def no_head(text: str, seed: int) -> str:
    """Lose the first lines, up to where the trouble starts."""
    lines = text.split("\n")
    quiet = 0
    while quiet < len(lines) // 4 and not re.search(r"(?i)trace|error|fail|rank|xid|cancel", lines[quiet]):
        quiet += 1
    return "\n".join(lines[quiet:])


CHANGES: Mapping[str, Callable[[str, int], str]] = {
    "other rank numbers": renumber_ranks,
    "other paths": other_paths,
    "other versions": other_versions,
    "other prefixes": other_prefixes,
    "chatter between the lines": chatter,
    "colours, progress bar, CRLF": terminal,
    "without its head": no_head,
}
