"""The directory of checkpoints as rank 0 keeps it: clean, verify, select, begin, commit, retire.

One process holds it from its first resume or save on: two that write there would resume from one another's state, and
delete what the other is about to commit. The hold is a lease beside that of the job (see `core/lease.py`), since it is
about processes: two of them may have one job key.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import attrs

from resilience_sdk.checkpoint.commit import begin, check_directory, clean_leftovers, commit, delete, open_trusted
from resilience_sdk.checkpoint.history import CheckpointId, Rollback
from resilience_sdk.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    Selection,
    decode_manifest,
    find_deletable,
    find_size_fault,
    select_newest,
    step_name,
)
from resilience_sdk.core.console import say_once
from resilience_sdk.core.lease import RENEW_INTERVAL_S, Lease, WriterLease
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import CheckpointError
from resilience_sdk.system import same_device

_CHUNK = 1 << 20
# Far above any real one: a few names per rank. A garbage file must not fill the memory.
_LARGEST_MANIFEST = 256 << 20


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint directory; raises `InvalidCheckpointError` with the reason."""
    check_directory(directory, may_be_link=True)
    try:
        with open_trusted(directory / MANIFEST_NAME) as file:
            return decode_manifest(file.read(_LARGEST_MANIFEST))
    except OSError as error:
        raise InvalidCheckpointError(f"{MANIFEST_NAME} cannot be read: {error.strerror}") from error


def verify_checkpoint(directory: Path) -> Manifest:
    """Return the manifest after reading every file; raises `InvalidCheckpointError` with the reason."""
    manifest = read_manifest(directory)
    # Sizes of all files first: the common tear is found without reading gigabytes.
    fault = find_size_fault(manifest, sizes_of(directory, manifest))
    if fault is not None:
        raise InvalidCheckpointError(fault)
    for name in manifest.directories:
        check_directory(directory / name)
    for entry in manifest.files:
        with open_trusted(directory / entry.name) as file:
            _verify_content(file, entry)
    return manifest


def sizes_of(directory: Path, manifest: Manifest) -> dict[str, int]:
    """Return the size in bytes of each file of a manifest that is there."""
    sizes: dict[str, int] = {}
    for entry in manifest.files:
        with contextlib.suppress(OSError):
            sizes[entry.name] = (directory / entry.name).stat(follow_symlinks=False).st_size
    return sizes


def _verify_content(file: BinaryIO, entry: FileEntry) -> None:
    crc = 0
    try:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    except OSError as error:
        raise InvalidCheckpointError(f"{entry.name} cannot be read: {error.strerror}") from error
    if crc != entry.crc32:
        raise InvalidCheckpointError(f"{entry.name} does not match its checksum")


class CheckpointStore:
    """The checkpoints of one run directory. Only rank 0 changes anything here, from one thread.

    Every method may raise `OSError` unless it says otherwise.
    """

    def __init__(self, directory: Path, *, keep: int, group_readable: bool, read_only: bool = False) -> None:
        self.directory = directory
        self.hold: WriterHold | None = None
        """What keeps other processes from writing here; None where nothing does."""
        self.directory_mode, self.file_mode = (0o750, 0o640) if group_readable else (0o700, 0o600)
        self._keep = keep
        self._is_clean = read_only
        self._unshared: set[str] = set()
        # Names of those whose every byte this process has written or read and found right.
        self._known_good: set[str] = set()
        self._spoiled: set[str] = set()  # likewise, but there is a NaN in them
        self._committed: str | None = None  # the last one, which stays whatever the others are

    def clean(self) -> None:
        """Remove what killed writers left; once, before the first own save."""
        if not self._is_clean:
            same_device.check(self.directory)
            self.directory.mkdir(mode=self.directory_mode, exist_ok=True)
            clean_leftovers(self.directory, self._in_flight())
            self._is_clean = True

    def _in_flight(self) -> set[str]:
        return self._unshared if self.hold is None else self.hold.in_flight

    def find_newest(
        self,
        quarantined: Mapping[CheckpointId, str] | None = None,
        rollbacks: Sequence[Rollback] = (),
        *,
        may_clean: bool = True,
    ) -> Selection:
        """Return the newest checkpoint of which every byte is there, and why newer ones were skipped.

        `quarantined` ones, and those with a NaN, are taken only if there is nothing else, those that a rollback leaves
        behind never.
        """
        if may_clean:
            self.clean()
        reasons = quarantined or {}

        def examine(name: str) -> Manifest:
            check_directory(self.directory, may_be_link=True)
            manifest = verify_checkpoint(self.directory / name)
            for back in rollbacks:
                if why := back.why_bad(manifest.step, manifest.created_at):
                    raise InvalidCheckpointError(why, rolled_back=True)
            if manifest.nan is not None:
                self._note_whole(name, manifest)
            return manifest

        selection = select_newest(
            os.listdir(self.directory),
            examine,
            lambda name, manifest: manifest.why_bad or reasons.get(CheckpointId(name, manifest.created_at)),
        )
        if selection.name is not None and selection.manifest is not None:
            self._note_whole(selection.name, selection.manifest)
        return selection

    def _note_whole(self, name: str, manifest: Manifest) -> None:
        known, other = (self._known_good, self._spoiled) if manifest.nan is None else (self._spoiled, self._known_good)
        known.add(name)
        other.discard(name)  # a step may be saved again

    def begin(self, step: int, token: str) -> Path:
        """Make and return the unfinished directory of a save; raises `CheckpointError` if another process took over."""
        if self.hold is not None:
            self.hold.check()
        self.clean()
        self._in_flight().add(token)
        return begin(self.directory, step, token, mode=self.directory_mode)

    def commit(self, unfinished: Path, manifest: Manifest, token: str) -> Path:
        """Give an unfinished checkpoint its name; return its path."""
        path = commit(unfinished, manifest, token, mode=self.file_mode)
        self._in_flight().discard(token)
        self._note_whole(path.name, manifest)
        self._committed = path.name
        return path

    def retire(self, token: str) -> list[str]:
        """Delete what is no longer needed and return the names; never raises, what stays is tried again."""
        try:
            names = os.listdir(self.directory)
        except OSError:
            return []
        doomed = find_deletable(names, self._known_good, self._keep, self._spoiled)
        deleted = [name for name in doomed if name != self._committed and delete(self.directory / name, token)]
        self._known_good.difference_update(deleted)
        self._spoiled.difference_update(deleted)
        return deleted

    def path_of(self, step: int) -> Path:
        """Return where the checkpoint of `step` is or would be. Never raises."""
        return self.directory / step_name(step)


@attrs.frozen
class Claim:
    """In whose name a process writes checkpoints."""

    job: str
    alone: bool
    """Another living process with this job key is a writer of its own: nobody sees to it that there is only one."""
    kin: frozenset[int] = frozenset()
    """Processes whose hold is this one's too: who started it."""


class WriterHold:
    """This process's hold, shared by all its checkpointers of one run directory. It ends with the last of them.

    A thread renews it. Where none can be had it lasts for a minute on other hosts, on this one as long as the process.
    """

    def __init__(self, lease: Lease) -> None:
        """Use `hold_checkpoints`."""
        self.in_flight: set[str] = set()
        """Tokens of what a checkpointer of this process writes now: no leftovers for another one of them."""
        self._lost = threading.Event()
        ended = threading.Event()
        # At the end of the process, too; and not in a child that it forks, whose hold this is not.
        multiprocessing.util.Finalize(self, _end, (lease, ended), exitpriority=0)
        try:
            threading.Thread(
                target=_renew, args=(lease, ended, self._lost), name="resilience-writer", daemon=True
            ).start()
        except RuntimeError as error:
            say_once(
                f"writer:{lease.path}", f"{lease.path} is not renewed ({error}): another host may write there, too"
            )

    def check(self) -> None:
        """Raise `CheckpointError` where another process has taken over, as it may from one that was long frozen."""
        if self._lost.is_set():
            raise CheckpointError("another process writes the checkpoints there now, since this one was silent")


def hold_checkpoints(run_dir: RunDirectory, claim: Claim) -> WriterHold:
    """Become the one writer of the checkpoints in `run_dir`. Any thread.

    Raises `DirectoryInUseError` where another process is, `RunDirectoryError` where it cannot be told.
    """
    place = os.path.realpath(run_dir.path)
    hold = _holds.get(place)
    if hold is None:
        hold = WriterHold(WriterLease.acquire(run_dir, claim.job, alone=claim.alone, kin=claim.kin))
        _holds[place] = hold
    return hold


# By place. A forked child finds what its parent held: it is of the same job.
_holds: weakref.WeakValueDictionary[str, WriterHold] = weakref.WeakValueDictionary()


def _renew(lease: Lease, ended: threading.Event, lost: threading.Event) -> None:
    while not ended.wait(RENEW_INTERVAL_S):
        if not lease.path.parent.exists():
            return  # removed by its owner: nothing is left to hold
        if not lease.renew():
            lost.set()
            return


def _end(lease: Lease, ended: threading.Event) -> None:
    ended.set()
    lease.release()
