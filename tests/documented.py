"""The blocks of the documentation: which there are, and what in them can be held against the program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
_ASSIGNMENT = re.compile(r"\w+=")
_TORCHRUN = "torchrun"


@attrs.frozen
class Block:
    """A fenced block of a page."""

    page: Path
    kind: str
    title: str
    text: str

    @property
    def place(self) -> str:
        """Name the page and the block's first line."""
        return f"{self.page.relative_to(ROOT)}: {self.text.strip().splitlines()[0] if self.text.strip() else ''}"


def blocks(page: Path, *kinds: str) -> list[Block]:
    """Return the blocks of these kinds on a page, without the indentation of a list or a tab."""
    return [
        Block(
            page,
            found["kind"],
            next(iter(re.findall(r'title="(.*?)"', found["options"])), ""),
            re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
        )
        for found in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if found["kind"] in kinds
    ]


def options_used(text: str) -> Iterator[tuple[str, str]]:
    """Yield each option of ours and of torchrun that a block of shell commands uses, with its program.

    The program is `torchrun`, or a subcommand of `resilience`. Options behind the script are the script's own.
    """
    for line in text.replace("\\\n", " ").splitlines():
        for command in _commands(_words(line)):
            name, rest = _program(command)
            for word in rest if name else ():
                if word == "--" or word.endswith(".py"):
                    break
                if word.startswith("--"):
                    yield name, word.partition("=")[0]
                elif word == "-m" and name == _TORCHRUN:
                    break


def _words(line: str) -> list[str]:
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    return list(reader)


def _commands(words: list[str]) -> Iterator[list[str]]:
    """Yield the parts of a line that are commands of their own: between `|`, `&&`, `;`, and behind `--`."""
    part: list[str] = []
    for word in words:
        if word in ("|", "||", "&&", ";", "--"):
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _program(words: list[str]) -> tuple[str, list[str]]:
    """Return the program of a command, empty where it is not ours to check, and the words behind it."""
    for index, word in enumerate(words):
        if word == _TORCHRUN:
            return word, words[index + 1 :]
        if word == "resilience" and words[index + 1 : index + 2]:
            return words[index + 1], words[index + 2 :]
        if not (_ASSIGNMENT.match(word) or word in ("export", "srun", "exec", "$")):
            break
    return "", []
