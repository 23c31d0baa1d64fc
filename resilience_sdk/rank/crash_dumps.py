"""The stacks of a process that dies of a fatal signal, written by `faulthandler` into a file of ours.

Whoever switches it on last has it: a program that does so itself keeps it, in its file, and in its children.
"""

from __future__ import annotations

import faulthandler
import functools
import sys
from collections.abc import Callable
from typing import Any

_enable = faulthandler.enable
_program_has_it: Callable[[], None] = lambda: None  # noqa: E731 - replaced by whoever enables it


def enable(file: int, program_has_it: Callable[[], None]) -> None:
    """Have the stacks of all threads written to this descriptor; the process still dies of the signal.

    `program_has_it` is called as soon as the program switches faulthandler on itself.
    """
    global _program_has_it
    _program_has_it = program_has_it
    # The C stack of Python 3.14 takes locks, which a process that dies inside of malloc() holds.
    more: dict[str, Any] = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    _enable(file=file, all_threads=True, **more)
    if faulthandler.enable is _enable:
        faulthandler.enable = _by_program


@functools.wraps(_enable)
def _by_program(*args: Any, **options: Any) -> None:
    _enable(*args, **options)
    _program_has_it()
