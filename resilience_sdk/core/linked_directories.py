"""Parts of a run directory that their owner has put on other storage by a symbolic link, such as to scratch space.

What is written there is read back and obeyed, so a link is followed only where nobody else can change what it leads to.
All else is refused by name before anything is written: a save that goes through a link that no resume follows is lost.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from resilience_sdk.errors import RunDirectoryError

_MAY_BE_LINKS = ("checkpoints", "incidents", "journal", "logs")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def refuse_bad_links(run_dir: Path) -> None:
    """Raise `RunDirectoryError` where a part of a run directory, or it itself, is a link that cannot be followed."""
    for path in (run_dir, *(run_dir / name for name in _MAY_BE_LINKS)):
        if _is_link(path) and (fault := link_fault(path)) is not None:
            raise RunDirectoryError(fault)


def _is_link(path: Path) -> bool:
    """Return whether a path is a link; of a directory that may not be entered, its owner says more than this."""
    try:
        return path.is_symlink()
    except OSError:
        return False


def link_fault(link: Path) -> str | None:
    """Return why a link must not be followed to a directory, with the cure; None where it may."""
    user = os.geteuid()
    told = f"{link} is a link to {_target_of(link)}"
    if link.lstat().st_uid not in (user, 0):
        return f"{told} that belongs to user {link.lstat().st_uid}: make it yourself, or remove it"
    try:
        facts = link.stat()
    except OSError as error:
        return (
            f"{told}, which cannot be reached ({error.strerror}): make that directory "
            f"(mkdir -p -m 700 {_target_of(link)}), mount it, or remove the link"
        )
    if not stat.S_ISDIR(facts.st_mode):
        return f"{told}, which is no directory: link to a directory, or remove the link"
    if facts.st_uid not in (user, 0):
        return (
            f"{told}, which belongs to user {facts.st_uid}: what another user can change is never trusted; "
            "link to a directory of your own"
        )
    if facts.st_mode & _OTHERS_MAY_WRITE:
        return f"{told}, which others may write to: run chmod go-w {_target_of(link)}, so that it can be trusted"
    real = Path(os.path.realpath(link))
    for place in real.parents:
        above = place.stat()
        # In a directory that all may write to, without the sticky bit, anyone can put another one in its place.
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            return (
                f"{told}, which others can replace, since they may write to {place}: "
                f"run chmod o-w {place}, or chmod +t {place}, or link to another place"
            )
    return None


def _target_of(link: Path) -> str:
    return os.path.join(os.path.dirname(link), os.readlink(link))
