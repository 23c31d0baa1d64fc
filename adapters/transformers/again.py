"""A step that is saved again, as at the end of an epoch: the first save stays until the second one is whole.

A trainer writes over `checkpoint-<step>` file by file. So one that is complete steps aside first, under a name that
neither a trainer nor anybody else takes for a checkpoint, and comes back where the second save fails or is killed.
"""

from __future__ import annotations

import errno
import re
import secrets
from contextlib import suppress
from pathlib import Path

from resilience_sdk.adapters.transformers import marks
from resilience_sdk.checkpoint.commit import remove_tree

_ASIDE = re.compile(r"\.(checkpoint-\d+)\.before(-[0-9a-f]+)?")


def set_aside(directory: Path) -> None:
    """Move a checkpoint away if it is complete, on the rank that makes the directories; raises `OSError`."""
    if marks.examine(directory).fault is None:
        directory.rename(_aside(directory))


def drop(directory: Path) -> None:
    """Remove what was set aside, now that the step is saved again. Never raises."""
    remove_tree(_aside(directory))


def put_back(output_dir: Path) -> None:
    """Give what a failed or killed save has left aside its name again; raises `OSError`.

    Before anything is saved there, by the training that saves there. Ranks may do so at once, on several nodes too:
    what is complete is only ever renamed, and a tree is deleted only under a name that no other rank gives.
    """
    for directory, aside in _asides(output_dir):
        if marks.examine(directory).fault is None:
            remove_tree(aside)
        elif marks.examine(aside).fault is None:
            _exchange(directory, aside)


def _exchange(directory: Path, aside: Path) -> None:
    """Put what is aside in the place of a save that did not end; another rank may be doing the same."""
    own = aside.with_name(f".{directory.name}.before-{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):
        directory.rename(own)
    _rename_unless_taken(aside, directory)
    # What was taken away may be what another rank had put there since it was looked at. Killed here, it is found aside.
    if marks.examine(own).fault is None:
        _rename_unless_taken(own, directory)
    else:
        remove_tree(own)


def _rename_unless_taken(path: Path, name: Path) -> None:
    try:
        path.rename(name)
    except FileNotFoundError:  # another rank has renamed it
        pass
    except OSError as error:  # a directory never takes the place of one with files in it
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def place_of(directory: Path) -> Path:
    """Return where the complete checkpoint of this name is now: aside, where its second save did not end."""
    if marks.examine(directory).fault is not None:
        for wanted, aside in _asides(directory.parent):
            if wanted == directory and marks.examine(aside).fault is None:
                return aside
    return directory


def name_of(path: Path) -> Path:
    """Return which name a checkpoint has when it was put back."""
    match = _ASIDE.fullmatch(path.name)
    return path if match is None else path.with_name(match[1])


def names_in(output_dir: Path) -> set[Path]:
    """Return the checkpoints of which one was set aside; raises `OSError`."""
    return {directory for directory, _ in _asides(output_dir)}


def _asides(output_dir: Path) -> list[tuple[Path, Path]]:
    try:
        return [(name_of(path), path) for path in sorted(output_dir.iterdir()) if _ASIDE.fullmatch(path.name)]
    except FileNotFoundError:
        return []


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.before")
