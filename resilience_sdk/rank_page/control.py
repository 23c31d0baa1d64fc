"""The two words of a rank page that the node's monitor writes, and those of the rank that answer them."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from resilience_sdk.rank_page import layout as at


class ControlWords:
    """A rank page mapped for writing by the monitor, which writes CONTROL and DEADLINE_NS only. One thread.

    Each word is one aligned store or load; nothing here relies on the order in which others see two of them.
    """

    def __init__(self, path: Path) -> None:
        """Map the page. Raises OSError when it is not a private file of ours, or too small."""
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise PermissionError(1, f"{path} is not a private file of this user")
            if info.st_size < at.PAGE_BYTES:
                raise OSError(22, f"{path} has {info.st_size} bytes, a rank page has {at.PAGE_BYTES}")
            self._mapping = mmap.mmap(fd, at.PAGE_BYTES)
        finally:
            os.close(fd)
        self._bytes = memoryview(self._mapping)
        self._words: memoryview[int] = self._bytes.cast("Q")

    @property
    def checks(self) -> int:
        """How often the rank has called `preemption.check()`."""
        return self._words[at.W_CHECKS]

    @property
    def acknowledged(self) -> int:
        """The newest round that the rank has acknowledged."""
        return self._words[at.W_ACKNOWLEDGED]

    @property
    def notice(self) -> int:
        """The number of the signal that asked this rank to leave, or NOTICE_REQUEST; 0: nobody has."""
        return self._words[at.W_NOTICE]

    @property
    def control(self) -> int:
        """What was proposed last, by this monitor or the one before."""
        return self._words[at.W_CONTROL]

    @property
    def deadline(self) -> int:
        """When the rank's time is over (monotonic nanoseconds), 0 when nobody has said."""
        return self._words[at.W_DEADLINE_NS]

    def propose(self, control: int) -> None:
        """Show the rank a proposal."""
        self._words[at.W_CONTROL] = control

    def set_deadline(self, deadline_ns: int) -> None:
        """Tell the rank when its time is over (monotonic nanoseconds)."""
        self._words[at.W_DEADLINE_NS] = deadline_ns

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._bytes.release()
        self._mapping.close()
