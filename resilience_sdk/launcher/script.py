"""What the ranks run, as one value that travels from the command line to the worker."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Sequence
from typing import Literal

import attrs

from resilience_sdk.errors import ConfigError

Kind = Literal["file", "module", "binary"]


def _strings(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


@attrs.frozen
class Script:
    """A program and its arguments, as torchrun understands them. Immutable, picklable, JSON-able.

    `file`: a Python file, or a directory or zip archive with a `__main__.py`. `module`: `-m package.module`.
    `binary`: `--no-python`, anything that can be executed.
    """

    kind: Kind = attrs.field(validator=attrs.validators.in_(("file", "module", "binary")))
    target: str = attrs.field(validator=attrs.validators.instance_of(str))
    args: tuple[str, ...] = attrs.field(default=(), converter=_strings)

    @classmethod
    def parse(cls, target: str, args: Sequence[str] = (), *, module: bool = False, no_python: bool = False) -> Script:
        """Build the value from torchrun's positional arguments and its `-m` and `--no-python`.

        Raises:
            ConfigError: the two options exclude one another, or there is no target.
        """
        if module and no_python:
            raise ConfigError("-m and --no-python exclude one another: a module needs Python; drop one of them")
        if not target:
            raise ConfigError("no script given; usage: resilience run [options] script.py [arguments]")
        kind: Kind = "module" if module else "binary" if no_python else "file"
        return cls(kind, target, tuple(args))

    def check(self) -> None:
        """Refuse what cannot be started, before any rank exists.

        A module is not looked up here: that would import its parent packages into the launcher.

        Raises:
            ConfigError: names what was given and the nearest match that exists.
        """
        if self.kind == "file" and not os.path.exists(self.target):
            raise ConfigError(f"script {self.target!r} does not exist{_nearest(self.target)}")
        if self.kind == "binary" and shutil.which(self.target) is None:
            raise ConfigError(
                f"--no-python {self.target!r} cannot be executed: no such program in PATH, "
                "or the file is not executable (chmod +x)"
            )

    def with_args(self, args: Sequence[str]) -> Script:
        """Return the same program with other arguments (elastic substitutes `${local_rank}` per rank)."""
        return attrs.evolve(self, args=tuple(args))

    def command(self, python: str) -> list[str]:
        """Return the command line that torchrun would execute for this script."""
        if self.kind == "binary":
            return [self.target, *self.args]
        switch = ["-m"] if self.kind == "module" else []
        return [python, "-u", *switch, self.target, *self.args]


def _nearest(path: str) -> str:
    folder, name = os.path.split(path)
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return f": there is no folder {folder!r}"
    matches = difflib.get_close_matches(name, there, n=1)
    return f"; did you mean {os.path.join(folder, matches[0])!r}?" if matches else f" in {os.path.abspath(folder)!r}"
