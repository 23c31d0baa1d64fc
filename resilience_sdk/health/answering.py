"""How a program that the launcher has started tells its answer: one line, on a descriptor that its task names.

Whatever else is written by this process and by those that it starts is for people, and goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any


def read_task() -> dict[str, Any]:
    """Return the task from standard input; from then on nobody but `tell` can write where the answer goes."""
    task: dict[str, Any] = json.load(sys.stdin)
    os.set_inheritable(task["answer"], False)
    with contextlib.suppress(OSError):  # there may be no standard error
        os.dup2(2, 1)
    return task


def tell(task: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Write the answer to a task."""
    with open(task["answer"], "wb", closefd=False) as way:
        way.write(json.dumps(answer).encode() + b"\n")
