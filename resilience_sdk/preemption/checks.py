"""What `check()` looks at: a page's words, and a flag that says when there is more to do."""

from __future__ import annotations

import ctypes
from typing import Any

from resilience_sdk.rank_page import layout as at


class Checks:
    """The state of `check()`; `answer` is asked when `flag` is true. The training thread's.

    As it stands it is the state of a process in which nothing is recorded.
    """

    __slots__ = ("flag", "words")

    def __init__(self, words: Any = None, flag: Any = False) -> None:
        """Take a page's words, or make some that nobody else reads."""
        self.words = [0] * at.LANES_AT if words is None else words
        self.flag = flag

    def answer(self, count: int, step: int | None) -> bool:
        """Tell whether to stop at check `count`."""
        return False


def control_flag(words: Any) -> Any:
    """Return what is true while the control word is not 0; nothing that Python has is asked faster than a C integer."""
    is_memory = isinstance(words, memoryview)
    return ctypes.c_uint64.from_buffer(words, 8 * at.W_CONTROL) if is_memory else _WordFlag(words)


class _WordFlag:
    """The same for words that are no memory."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def __bool__(self) -> bool:
        return bool(self._words[at.W_CONTROL])
